"""Runs at the start of every Python process below ``memlog run``, which has put this folder on the path.

It leaves Python as it would be without: its folder off the path, and the ``sitecustomize`` that would
have been imported in its place imported. What stays is an eye on two imports and, in the one process that
was launched directly, a line at its end where nothing was recorded.
"""

import os
import sys


def _prepare(told: str) -> None:
    # The interpreter's own module is there; importing importlib takes as long as all of this.
    from _frozen_importlib_external import SourceFileLoader

    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    loader = SourceFileLoader(
        "memlog_imports", os.path.join(package, "_internal", "import_hook.py")
    )
    imports = type(sys)("memlog_imports")
    loader.exec_module(imports)
    imports.ImportWatch("torch.optim.optimizer", "memlog", callback=_wait_for_a_session)
    if told.startswith(f'{{"pid":{os.getpid()},'):
        import atexit

        atexit.register(_say_if_nothing_was_recorded, told, os.getpid())


def _wait_for_a_session(_module: object) -> None:
    try:
        from memlog.launch import starter

        starter.wait()
    except Exception as error:
        _say(f"this process is not recorded, it goes on ({_named(error)}; {sys.executable})")


def _say_if_nothing_was_recorded(told: str, pid: int) -> None:
    try:
        session = sys.modules.get("memlog._internal.current_session")
        begun = session is not None and not session.on_demand()
        if os.getpid() == pid and not begun and not _recorded_below(told):
            why = "without PyTorch memlog notices no step by itself"
            if "torch" in sys.modules:
                why = (
                    "no step of a torch optimizer was noticed (none was made, or it was inside "
                    "torch.compile)"
                )
            _say(
                f"nothing was recorded: {why}: call session = memlog.init() in the script and session.step() "
                "after each step, or use memlog's monitors or memlog.watch_loss"
            )
    except Exception as error:
        _say(f"looking whether anything was recorded failed ({_named(error)})")


def _recorded_below(told: str) -> bool:
    """Whether any process below has made a run's folder: then the folder around it has changed."""
    import json

    launch = json.loads(told)
    try:
        changed = os.stat(launch["directory"]).st_mtime_ns
    except OSError:
        return False
    return bool(changed != launch.get("changed"))


def _named(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _say(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"memlog: {message}\n")


sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
_told = os.environ.get("MEMLOG_LAUNCH")
if _told:
    try:
        _prepare(_told)
    except Exception as _error:
        _say(f"this process is not recorded, it goes on ({_named(_error)})")

# The import of this file ends as that of the next one of its name: with that one's error, if it has one,
# and where there is none with the error that Python passes over, as it does without this file.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
