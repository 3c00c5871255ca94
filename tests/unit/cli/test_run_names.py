"""Every command finds a run by its name or id in a tracker, and by memlog's own id."""

from pathlib import Path

import pytest
from support.commands import memlog
from support.journals import GIB, MadeRun, at, batch

from memlog.errors import AmbiguousRunError
from memlog.events import Run
from memlog.journal import Binding, RunDirectory, find_run
from memlog.journal.delivery_state import UploadState


def made(root: Path, run_id: str, name: str | None = None) -> RunDirectory:
    run = MadeRun(root, run_id)
    return run.write(Run(at(0), name, None, (), {}), batch(0, GIB)).closed()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs: one joined in MLflow, one that memlog opened in W&B, one named in ``init``, three of one name."""
    joined = MadeRun(tmp_path, "aaaa2222").write(Run(at(0), None, None, (), {}))
    joined.bound("mlflow", "0a1b2c3d", "http://tracker", "first").write(batch(0, GIB))
    joined.bound("mlflow", "9f8e7d6c", "http://tracker", "second").write(batch(1, GIB)).closed()
    opened = made(tmp_path, "bbbb3333")
    binding = Binding("memlog-bbbb3333", "https://api.wandb.ai/me/p/runs/x", "swift-sun-3")
    UploadState(backend="wandb", own_run=binding).save(opened)
    made(tmp_path, "cccc4444", "gpt-small")
    for run_id in ("dddd5555", "eeee6666", "ffff7777"):
        made(tmp_path, run_id, "baseline")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("aaaa2222", "aaaa2222"),
        ("aaa", "aaaa2222"),
        ("first", "aaaa2222"),
        ("second", "aaaa2222"),
        ("9f8e7d6c", "aaaa2222"),
        ("swift-sun-3", "bbbb3333"),
        ("memlog-bbbb3333", "bbbb3333"),
        ("gpt-small", "cccc4444"),
    ],
)
def test_a_run_is_found_by_each_of_its_names(runs: Path, name: str, found: str) -> None:
    assert find_run(runs, name).id == found


def test_a_name_of_several_runs_lists_them(runs: Path) -> None:
    with pytest.raises(
        AmbiguousRunError,
        match=r"^3 runs are called 'baseline' \(ffff7777 of 2026-.*, dddd5555 of 2026-[^,]*\): pass one of",
    ):
        find_run(runs, "baseline")


def test_of_many_runs_only_the_newest_are_listed(tmp_path: Path) -> None:
    for number in range(8):
        made(tmp_path, f"run{number}", "sweep")
    with pytest.raises(AmbiguousRunError) as caught:
        find_run(tmp_path, "sweep")
    assert str(caught.value).startswith("8 runs are called 'sweep' (run7 of ")
    assert " and 3 older): pass one of these ids" in str(caught.value)


def test_a_name_comes_before_the_beginning_of_another_id(runs: Path) -> None:
    made(runs, "gpt-smallest")
    assert find_run(runs, "gpt-small").id == "cccc4444"
    made(runs, "named222", "dddd5555")
    assert find_run(runs, "dddd5555").id == "dddd5555"  # memlog's own id comes first


def test_a_folder_that_cannot_be_read_hides_no_other(runs: Path) -> None:
    (runs / "aaaa2222" / "delivery").rmdir()
    (runs / "aaaa2222" / "delivery").write_text("no folder")
    assert find_run(runs, "gpt-small").id == "cccc4444"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "NAME"),
        ("watch", "NAME", "--once"),
        ("compare", "NAME", "swift-sun-3"),
        ("sync", "NAME", "--to", "mlflow"),
        ("pull", "NAME", "-o", "out"),
        ("pull", "NAME", "-o", "out", "--backend", "mlflow"),
        ("advise", "NAME"),
        ("open", "NAME"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_takes_it(runs: Path, arguments: tuple[str, ...]) -> None:
    words = ["baseline" if word == "NAME" else word for word in arguments]
    result = memlog(*words, "--dir", str(runs))
    assert result.exit_code == 1
    assert "3 runs are called 'baseline'" in result.stderr
    assert result.stderr.count("\n") == 1
