"""``memlog run``: its checks, the options that it passes on, and how the launched process reads them."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from memlog._internal import current_session, processes
from memlog._internal.current_session import VARIABLE, Launch, launch
from memlog._internal.import_hook import ImportWatch
from memlog.cli.main import cli
from memlog.errors import LaunchError
from memlog.launch.command import SITE, environment, execute
from memlog.settings import resolve

LAUNCH = Launch(
    pid=7, directory="/runs", changed=15, backends=("mlflow",), alerts=("host.rss > 80%",)
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("MEMLOG_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


Executed = list[tuple[Sequence[str], Mapping[str, str]]]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """Return the command and environment that would replace this process."""
    calls: Executed = []
    monkeypatch.setattr("memlog.cli.run.execute", lambda *call: calls.append(call) or sys.exit(0))
    return calls


def memlog_run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


def test_options_are_handed_over_and_the_command_is_left_as_it_is(
    executed: Executed, tmp_path: Path
) -> None:
    arguments = (
        "--backend",
        "mlflow,local",
        "--alert",
        "host.rss > 1 GiB",
        "--every",
        "5",
        "--name",
        "n",
        "--layers",
        "--budget",
        "0.05",
    )
    command = ("python", "train.py", "--every", "2", "--", "-h")
    assert memlog_run(*arguments, "--dir", "here", "--", *command).exit_code == 0
    assert memlog_run(*arguments, *command).exit_code == 0  # `--` is optional
    for called, environ in executed:
        assert called == command
        found = launch_of(environ)
        assert (found.backends, found.alerts) == (("mlflow", "local"), ("host.rss > 1 GiB",))
        assert (found.every, found.name, found.project) == (5, "n", None)
        assert (found.layers, found.budget) == (True, 0.05)
        assert found.pid == os.getpid()
    assert launch_of(executed[0][1]).directory == str(tmp_path / "here")
    assert launch_of(executed[1][1]).directory == str(tmp_path / "memlog_runs")


def launch_of(environ: Mapping[str, str]) -> Launch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, environ[VARIABLE])
        found = launch()
    assert found is not None
    return found


def test_switched_off_the_command_runs_as_without_memlog(
    executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLOG_ENABLED", "0")
    memlog_run("python", "train.py")
    [(_, environ)] = executed
    assert VARIABLE not in environ
    assert str(SITE) not in environ.get("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--backend", "mlfow"), "no backend is called 'mlfow': did you mean 'mlflow'? "),
        (
            ("--alert", "host.rs > 3"),
            "an alert rule can't be read: 'host.rs' is not a figure: did you mean host.rss? ",
        ),
        (("--alert", "host.rss > 3 GiX"), "\n  host.rss > 3 GiX\n               ^\n"),
        (("--layers", "--budget", "2"), "budget=2.0: pass a share of training time, such as 0.01"),
        (("--budget", "0.1"), "--budget limits the cost of tracing layers: pass --layers, too"),
        (("--every", "0"), "Invalid value for '--every'"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_started(
    executed: Executed, arguments: tuple[str, ...], line: str
) -> None:
    result = memlog_run(*arguments, "--", "true")
    assert result.exit_code == 2
    assert line in result.stderr
    if not result.stderr.startswith("Usage:"):
        assert result.stderr.count("\n") == (3 if "--alert" in arguments else 1)
    assert executed == []


@pytest.mark.parametrize("folder", ["file", "/proc"])  # /proc only looks writable
def test_a_folder_that_cannot_be_created_is_an_error_at_once(
    executed: Executed, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("")
    result = memlog_run("--dir", f"{folder}/runs", "--", "true")
    assert result.exit_code == 1
    assert f"{folder} is not a writable folder; pass --dir or set MEMLOG_DIR" in result.stderr
    assert executed == []


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("no-such-program", 127, "command not found"),
        ("./missing", 127, "command not found"),
        ("./folder", 126, "is a folder"),
        ("./plain", 126, "make it executable"),
        ("./bare", 126, "memlog run -- bash ./bare"),
        ("", 127, "'' can't be run"),
    ],
)
def test_what_can_not_be_run_ends_as_in_a_shell(
    tmp_path: Path, program: str, code: int, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "bare").write_text("echo no\n")
    (tmp_path / "bare").chmod(0o755)
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(LaunchError, match=words) as caught:
        execute([program], os.environ)
    assert caught.value.exit_code == code
    assert signal.getsignal(signal.SIGPIPE) is before
    result = memlog_run("--", program)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1)


@pytest.mark.parametrize(
    ("inherited", "path"),
    [
        ({}, f"{SITE}"),
        ({"PYTHONPATH": ""}, f"{SITE}"),
        ({"PYTHONPATH": "/a:/b"}, f"{SITE}:/a:/b"),
        ({"PYTHONPATH": ":/a"}, f"{SITE}::/a"),  # the working directory stays where it was
        ({"PYTHONPATH": f"{SITE}:/a"}, f"{SITE}:/a"),  # a launcher below a launcher
    ],
)
def test_the_environment_differs_in_two_variables(inherited: dict[str, str], path: str) -> None:
    made = environment(LAUNCH, {"HOME": "/h", **inherited})
    assert made == {"HOME": "/h", "PYTHONPATH": path, VARIABLE: LAUNCH.encode()}


# below


def test_the_process_that_was_launched_is_known_by_the_variables_beginning() -> None:
    # sitecustomize.py looks for this, and so needs no JSON at the start of every process.
    assert LAUNCH.encode().startswith('{"pid":7,')


def test_the_launchers_options_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, LAUNCH.encode())
    monkeypatch.setenv("MEMLOG_BACKEND", "local")
    monkeypatch.setenv("MEMLOG_DIR", "/elsewhere")
    settings = resolve({})
    assert (settings.directory, settings.backends, settings.alerts) == (
        "/runs",
        ("mlflow",),
        ("host.rss > 80%",),
    )
    settings = resolve({"directory": "/mine"}, {"backend": "local", "alerts": ["host.rss > 1 GiB"]})
    assert (settings.directory, settings.backends, settings.alerts) == (
        "/mine",
        ("local",),
        ("host.rss > 1 GiB",),
    )


def test_a_later_rank_opens_no_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, LAUNCH.encode())
    monkeypatch.setenv("MEMLOG_BACKEND", "mlflow")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve({}).backends == ()
    assert resolve({"backends": ("mlflow",)}).backends == ("mlflow",)  # its script says so
    monkeypatch.setenv("RANK", "0")
    assert resolve({}).backends == ("mlflow",)


@pytest.mark.parametrize("text", ["{", "[]", '{"pid":"x"}', '{"pid":1}'])
def test_an_unreadable_variable_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with caplog.at_level(logging.WARNING, "memlog"):
        assert resolve({}).backends == ()
    assert "MEMLOG_LAUNCH can't be read" in caplog.text


def test_ranks_come_from_the_environment_or_from_torchs_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch import distributed as process_groups

    assert processes.described() == {}
    assert processes.is_first()
    monkeypatch.setattr(process_groups, "is_initialized", lambda: True)
    monkeypatch.setattr(process_groups, "get_rank", lambda: 3)
    monkeypatch.setattr(process_groups, "get_world_size", lambda: 4)
    assert processes.described() == {"rank": "3", "world_size": "4"}
    assert not processes.is_first()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.described() == {"rank": "0", "world_size": "2"}


def test_a_publisher_is_begun_on_demand_until_there_is_one() -> None:
    asked: list[str] = []
    current_session.begin_on_demand(lambda: asked.append("publish"))
    try:
        assert current_session.publisher() is None
        current_session.publisher()
        assert asked == ["publish", "publish"]
        current_session.set_publisher(object())
        assert not current_session.on_demand()
        current_session.publisher()
        assert asked == ["publish", "publish"]
    finally:
        current_session.set_publisher(None)
        current_session.begin_on_demand(None)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """Return the modules for which a watch of ``watched_a`` and ``watched_b`` called back."""
    for name in ("watched_a", "watched_b"):
        (tmp_path / f"{name}.py").write_text("whole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    heard: list[ModuleType] = []
    watch = ImportWatch("watched_a", "watched_b", callback=heard.append)
    yield heard
    watch.remove()
    for name in ("watched_a", "watched_b"):
        sys.modules.pop(name, None)


def test_the_first_import_of_several_modules_calls_back_once(modules: list[ModuleType]) -> None:
    from importlib import import_module
    from importlib.util import find_spec

    assert find_spec("watched_b")  # a program checks whether the module is installed
    assert modules == []
    imported = import_module("watched_b")
    import_module("watched_a")
    assert modules == [imported]
    assert imported.whole
