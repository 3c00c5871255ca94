"""Start code of every Python process below ``memlog run``.

``memlog run`` puts this file's folder on the path. This file removes the folder from the path, and then
imports the ``sitecustomize`` that Python would have imported otherwise. Afterwards memlog only watches for
two imports. The process that was launched directly also prints a line at its end if nothing was
recorded, unless it ended early.
"""

import os
import sys


def _prepare(options: str) -> None:
    # This frozen module is already loaded. To import importlib would take as long as this whole file.
    from _frozen_importlib_external import SourceFileLoader

    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    loader = SourceFileLoader(
        "memlog_imports", os.path.join(package, "_internal", "import_hook.py")
    )
    imports = type(sys)("memlog_imports")
    loader.exec_module(imports)
    imports.ImportWatch("torch.optim.optimizer", "memlog", callback=_wait_for_a_session)
    if options.startswith(f'{{"pid":{os.getpid()},'):
        import atexit

        atexit.register(_warn_if_nothing_was_recorded, options, os.getpid())


def _wait_for_a_session(_module: object) -> None:
    try:
        from memlog.launch import starter

        starter.wait()
    except Exception as error:
        _print(
            f"this process goes on without being recorded ({_described(error)}; {sys.executable})"
        )


def _warn_if_nothing_was_recorded(options: str, pid: int) -> None:
    try:
        session = sys.modules.get("memlog._internal.current_session")
        begun = session is not None and not session.on_demand()
        if os.getpid() == pid and not begun and not _ended_early() and not _recorded_below(options):
            _print(
                "nothing was recorded, because memlog noticed no optimizer step: call session = "
                "memlog.init() in the script and session.step() after each step, or use memlog's "
                "monitors, memlog_keras or memlog.watch_loss"
            )
    except Exception as error:
        _print(f"could not check whether this run was recorded ({_described(error)})")


def _ended_early() -> bool:
    """Return True if an exception ended the program, or if nothing suggests that it has trained.

    A program that has imported torch, but never built an autograd graph in its main thread, has not trained.
    """
    if hasattr(sys, "last_value") or not {"-h", "--help", "--version"}.isdisjoint(sys.argv[1:]):
        return True
    if "torch" not in sys.modules:
        return False
    try:
        from memlog.torchside.loaded import has_built_graphs
    except ImportError:
        return True  # this Python has no memlog, as it has said at the start
    return not has_built_graphs()


def _recorded_below(options: str) -> bool:
    """Return True if a child process has begun a run.

    A new run's folder changes the modification time of the folder that contains all runs.
    """
    import json

    launch = json.loads(options)
    try:
        changed = os.stat(launch["directory"]).st_mtime_ns
    except OSError:
        return False
    return bool(changed != launch.get("changed"))


def _described(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _print(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"memlog: {message}\n")


sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
_options = os.environ.get("MEMLOG_LAUNCH")
if _options:
    try:
        _prepare(_options)
    except Exception as _error:
        _print(f"this process goes on without being recorded ({_described(_error)})")

# Import the next `sitecustomize`. If that module raises an error, the error passes through. If there is no
# such module, the import raises an ImportError. Python ignores this error, as it would without this file.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
