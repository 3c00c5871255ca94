"""A folder with garbage in place of a run does not affect the others: they are listed, shown and synced."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import thirdparty
from support.journals import finished_run
from support.thirdparty import ListBackend

from memlog.cli.main import cli
from memlog.journal import RunDirectory, list_runs
from memlog.journal.format import parse_segment_name, segment_name

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListBackend:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "runs"))
    return thirdparty.install(tmp_path / "site", monkeypatch)


def first_segment(run: RunDirectory) -> Path:
    return min(run.path.glob("trainer-*.jsonl"))


def later_name(run: RunDirectory) -> str:
    return first_segment(run).name.replace("-0001", "-0077")


def with_header(field: str, value: str) -> Callable[[RunDirectory], object]:
    def change(run: RunDirectory) -> None:
        first, rest = first_segment(run).read_text().split("\n", 1)
        before, after = first.split(f'"{field}":', 1)
        after = after.lstrip("-0123456789")
        first_segment(run).write_text(f'{before}"{field}":{value}{after}\n{rest}')

    return change


HUGE = "1" + "0" * 400
FOLDERS: dict[str, Callable[[RunDirectory], object]] = {
    "pipe": lambda run: os.mkfifo(run.path / "trainer-5-0001.jsonl"),
    "pipe as a successor": lambda run: os.mkfifo(run.path / later_name(run)),
    "folder": lambda run: (run.path / later_name(run)).mkdir(),
    "dangling link": lambda run: (run.path / later_name(run)).symlink_to("nowhere"),
    "link": lambda run: (run.path / "trainer-5-0001.jsonl").symlink_to(first_segment(run)),
    "state is a pipe": lambda run: os.mkfifo(run.delivery / "list.json"),
    "summary is a pipe": lambda run: os.mkfifo(run.path / "summary.json"),
    "begun beyond all reason": with_header("begun_us", HUGE),
    "begun before time": with_header("begun_us", str(-(2**63))),
    "no process": with_header("pid", "-1"),
    "a process beyond reason": with_header("pid", HUGE),
    "a step beyond all reason": with_header("initial_step", HUGE),
}


@pytest.mark.parametrize("how", FOLDERS)
def test_it_hangs_nothing_and_breaks_no_command(
    tmp_path: Path, backend: ListBackend, how: str
) -> None:
    good = finished_run(tmp_path / "runs", "goodgood")
    bad = finished_run(tmp_path / "runs", "badbadba")
    FOLDERS[how](bad)
    for command in ("runs", "runs --json", "show good", "sync good --to list", "show bad"):
        result = CliRunner().invoke(cli, command.split(), prog_name="memlog")
        assert result.exit_code == 0, (command, result.output)
        assert result.exception is None
        assert "good" in result.output or "bad" in command
    CliRunner().invoke(cli, ["sync", "bad", "--to", "list"], prog_name="memlog")
    assert good.id in {target.memlog_run for target in backend.tracker.opened}


def test_one_that_cannot_be_read_is_reported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished_run(tmp_path / "runs", "goodgood")
    bad = finished_run(tmp_path / "runs", "badbadba")
    scandir = os.scandir

    def refused(path: Path) -> object:  # tests run as root, whom nothing is refused
        if Path(path) == bad.path:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert [run.id for run in list_runs(tmp_path / "runs")] == ["goodgood"]
    [line] = [record.getMessage() for record in caplog.records]
    assert str(bad.path) in line
    assert "Permission denied" in line


def test_one_whose_name_is_no_utf_8_is_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "runs"
    finished_run(root, "goodgood")
    finished_run(root).path.rename(os.fsdecode(os.fsencode(root) + b"/\xff"))
    for command in ("runs", "show latest --json", "sync latest --to list"):
        done = CliRunner().invoke(cli, command.split())
        assert done.exit_code == 0, done.output
        assert "goodgood" in done.output or command.startswith("sync")
    assert "is left out, because it can't be read" in caplog.text


@pytest.mark.parametrize("number", [1, 42, 9999, 10000, 123456])
def test_a_segments_name_leads_back_to_it(number: int) -> None:
    assert parse_segment_name(segment_name("trainer-7", number)) == ("trainer-7", number)


@pytest.mark.parametrize(
    "tail", ["0000", "00001", "1", "001", "\u0660\u0660\u0660\u0661", "1" + "0" * 9, "1x"]
)
def test_no_other_name_is_a_segments(tail: str) -> None:
    assert parse_segment_name(f"trainer-7-{tail}.jsonl") is None
