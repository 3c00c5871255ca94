"""`memlog sync` delivers missing points to the right run, and failures lose nothing."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support import commands, thirdparty
from support.journals import GIB, MadeRun, at, batch
from support.thirdparty import ListBackend

from memlog._internal.processes import RankPosition
from memlog.events import End, Run
from memlog.journal import Binding, RunDirectory
from memlog.journal.delivery_state import HelperLock, UploadLock, UploadState
from memlog.sink import Target, TrackerRun

STEPS = 25
POINTS = 2 * STEPS


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ListBackend:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path / "runs"))
    return thirdparty.install(tmp_path / "site", monkeypatch)


def made_run(tmp_path: Path, *backends: str, alive: bool = False) -> MadeRun:
    made = MadeRun(tmp_path / "runs", alive=alive)
    return made.write(Run(at(0), "gpt", "language", backends, {}))


def steps(made: MadeRun) -> MadeRun:
    return made.write(*(batch(step, GIB) for step in range(STEPS)))


def finished(made: MadeRun) -> RunDirectory:
    return steps(made).write(End(at(3), "finished")).closed()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """An ended run that was recorded for the backend named "list"."""
    return finished(made_run(tmp_path, "list"))


SYNC = ("sync", "latest", "--timeout", "0")


def sync_output(*arguments: str) -> str:
    return commands.output_of(*SYNC, *arguments)


def complaint(*arguments: str, code: int) -> str:
    return commands.complaint(*SYNC, *arguments, code=code)


def test_everything_arrives_and_the_own_run_is_ended(
    run: RunDirectory, backend: ListBackend
) -> None:
    assert sync_output() == f"list: {POINTS} points delivered (run own-{run.id} at memory://host)\n"
    assert len(backend.tracker.all_points()) == POINTS
    assert backend.tracker.ended == {f"own-{run.id}": "finished"}
    [target] = backend.tracker.opened
    assert (target.project, target.name) == ("language", "gpt")
    assert target.begun_us == at(0)


def test_a_second_time_nothing_is_left_and_the_tracker_is_not_asked(
    run: RunDirectory, backend: ListBackend
) -> None:
    sync_output()
    backend.tracker.down = True
    backend.tracker.opened.clear()
    assert sync_output() == (
        f"list: nothing is left to deliver, {POINTS} points were delivered "
        f"(run own-{run.id} at memory://host)\n"
    )
    assert backend.tracker.opened == []


def test_points_that_came_after_follow(run: RunDirectory) -> None:
    sync_output()
    segment = max(run.path.glob("trainer-*.jsonl"))
    with segment.open("ab") as file:
        file.write(b'[99,["batch",1790000009000000,99,1,1,"exact"]]\n')
    assert sync_output().startswith("list: 2 points delivered")


def test_a_helper_that_died_before_it_ended_the_run_left_only_that(
    run: RunDirectory, backend: ListBackend
) -> None:
    sync_output()
    state = UploadState.load(run, "list")
    state.stage = "delivering"
    state.save(run)
    backend.tracker.ended.clear()
    assert sync_output().startswith("list: nothing was left to deliver (run own-")
    assert backend.tracker.ended == {f"own-{run.id}": "finished"}


def test_a_local_run_goes_to_the_backend_that_is_named(
    tmp_path: Path, backend: ListBackend
) -> None:
    run = steps(made_run(tmp_path, "local")).closed()
    assert sync_output("--to", "list").startswith(f"list: {POINTS + 1} points delivered")
    assert list(backend.tracker.ended.values()) == ["killed"]
    # The run ended without an end event. The additional point is the alert on this.
    [files] = backend.tracker.files.values()
    assert list(files) == [("postmortem", "postmortem.md"), ("report", "report.html")]
    assert [alert.rule for alert in backend.tracker.alerts[f"own-{run.id}"]] == [
        "ended unexpectedly"
    ]


def test_a_run_of_the_users_gets_its_points_without_being_named(
    tmp_path: Path, backend: ListBackend
) -> None:
    finished(made_run(tmp_path).bound("list", "users", "memory://host"))
    assert sync_output() == f"list: {POINTS} points delivered (run users at memory://host)\n"
    assert list(backend.tracker.points) == ["users"]


def test_a_run_that_is_still_going_stays_open(tmp_path: Path, backend: ListBackend) -> None:
    made = steps(made_run(tmp_path, "list", alive=True))
    first, second = sync_output().splitlines()
    # The newest step may still get another value.
    assert first.startswith(f"list: {POINTS - 2} points delivered")
    assert second.startswith(f"run {made.directory.id} is still running")
    assert backend.tracker.ended == {}
    made.write(End(at(9), "finished")).closed()
    assert sync_output().startswith("list: 2 points delivered")
    assert len(backend.tracker.all_points()) == POINTS


def test_nothing_is_lost_when_the_tracker_is_down(run: RunDirectory, backend: ListBackend) -> None:
    backend.tracker.down = True
    line = complaint(code=1)
    assert line.startswith(
        "list: the tracker is down: start it; gave up after 0 s: nothing is lost"
    )
    assert f"`memlog sync {run.id}`" in line
    backend.tracker.down = False
    assert sync_output().startswith(f"list: {POINTS} points delivered")


def test_it_retries_for_the_timeout(run: RunDirectory, backend: ListBackend) -> None:
    backend.tracker.down = True
    begun = time.monotonic()
    assert "gave up after 0.2 s" in complaint("--timeout", "0.2", code=1)
    assert time.monotonic() - begun >= 0.2
    assert len(backend.tracker.opened) >= 2


def test_a_client_that_fails_shows_no_traceback_and_no_password(
    run: RunDirectory, backend: ListBackend
) -> None:
    backend.tracker.crash_after = 1
    line = complaint(code=1)
    assert line.startswith(
        "list: RuntimeError: a bug in the client, password in memory://host; gave up"
    )
    assert UploadState.load(run, "list").stage == "unreachable"


def test_a_refused_run_is_reported_with_remedies(tmp_path: Path, backend: ListBackend) -> None:
    made = made_run(tmp_path, "list").bound("list", "gone", "memory://host")
    run = finished(steps(made).bound("list", "there", "memory://host"))
    backend.tracker.deleted = {"gone"}
    result = commands.memlog(*SYNC)
    assert result.exit_code == 1
    assert result.stdout == f"list: {POINTS} points delivered (run there at memory://host)\n"
    assert result.stderr == (
        f"memlog: list: the run gone is deleted: nothing is lost, `memlog sync {run.id}` delivers the rest "
        f"once it exists again, or `memlog sync {run.id} --own-run` delivers it to a run of memlog's own\n"
    )
    for command in ("runs", "show"):
        output = commands.output_of(command, *["latest"][: command == "show"])
        assert "the run gone is deleted" in " ".join(output.split())
    assert commands.memlog(*SYNC).stdout.startswith("list: nothing more was delivered")
    assert sync_output("--own-run").startswith(f"list: {POINTS} points delivered (2 runs)")
    assert set(backend.tracker.points) == {"there", "beside-gone"}


def test_the_memory_of_all_ranks_is_combined_once(tmp_path: Path, backend: ListBackend) -> None:
    """The helper process of the training has died with it."""
    for rank in range(3):
        made = MadeRun(tmp_path / "runs", f"rank{rank:04}").ranked(RankPosition(rank, 3, "a"))
        made.write(*(batch(step, (rank + 1) * GIB) for step in range(5))).closed()
    for _ in range(2):
        commands.output_of("sync", "rank0000", "--to", "list")
    largest = [p for p in backend.tracker.all_points() if p.name.endswith("host/rss_max_rank")]
    assert [(point.index, point.value) for point in largest] == [(step, 2) for step in range(5)]


def test_refused_points_are_reported(run: RunDirectory, backend: ListBackend) -> None:
    backend.tracker.bad = frozenset({"memory/host/rss_peak_mib"})
    assert sync_output().startswith(
        f"list: {STEPS} points delivered, {STEPS} refused (`memlog show` lists them)"
    )
    shown = commands.output_of("show", "latest")
    assert f"list: rejected: memory/host/rss_peak_mib {STEPS}" in shown


def test_a_live_helpers_lock_is_respected(run: RunDirectory) -> None:
    with UploadLock(run, "list"):
        assert "by its own helper process, which did not stop within" in complaint(
            "--timeout", "0", code=1
        )


def test_a_live_run_is_left_to_its_helper(tmp_path: Path) -> None:
    run = steps(made_run(tmp_path, "list", alive=True))
    with UploadLock(run.directory, "list"):
        assert "is not over, and its own helper process delivers to list" in complaint(code=1)


@pytest.mark.parametrize("at_work", [HelperLock, lambda run: UploadLock(run, "other")])
def test_an_end_is_explained_once_the_runs_own_helper_is_gone(
    tmp_path: Path, at_work: Callable[[RunDirectory], AbstractContextManager[object]]
) -> None:
    run = steps(made_run(tmp_path, "list")).closed()
    with at_work(run):
        commands.memlog(*SYNC)
        assert not run.artifacts.exists()
    commands.memlog(*SYNC)
    assert (run.artifacts / "postmortem.md").exists()


def test_a_failing_tracker_does_not_stop_the_others(tmp_path: Path) -> None:
    finished(made_run(tmp_path, "clientless", "list"))
    result = commands.memlog(*SYNC)
    assert result.exit_code == 2
    assert result.stdout.startswith(f"list: {POINTS} points delivered")
    assert "pip install 'list-client>=2'" in result.stderr


def test_what_cannot_be_delivered_to_is_refused_with_the_remedy(tmp_path: Path) -> None:
    steps(made_run(tmp_path, "local")).closed()
    assert "did you mean 'list'?" in complaint("--to", "lst", code=2)
    assert "pip install 'list-client>=2'" in complaint("--to", "clientless", code=2)
    assert "is the journal itself" in complaint("--to", "local", code=2)
    assert "was recorded for no tracker: name one with --to" in complaint(code=2)
    assert "installed: list" in complaint(code=2)


def test_a_name_in_a_journal_leads_to_no_file_outside(tmp_path: Path) -> None:
    finished(made_run(tmp_path, "../../evil").bound("../../worse", "x", None))
    before = {path for path in tmp_path.rglob("*") if path.name != "summary.json"}
    assert "no backend is called" in complaint(code=2)
    assert {path for path in tmp_path.rglob("*") if path.name != "summary.json"} == before


def the_target(backend: ListBackend) -> Target:
    [target] = backend.tracker.opened
    return target


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "http://host:5000/base"),
        ({"LIST_URI": "http://other:5000"}, "http://host:5000/base"),
        ({"LIST_URI": "http://me:secret@other:5000"}, "http://host:5000/base"),
        ({"LIST_URI": "http://me:secret@host:5000/base/"}, "http://me:secret@host:5000/base/"),
    ],
)
def test_a_joined_run_goes_on_where_it_is_with_the_environments_password(
    tmp_path: Path, backend: ListBackend, environment: dict[str, str], address: str
) -> None:
    steps(made_run(tmp_path).bound("list", "users", "http://host:5000/base")).closed()
    backend.environment = environment
    sync_output()
    assert the_target(backend).joined == TrackerRun("users", address)


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"LIST_URI": "http://other:5000"}, "http://host:5000"),
        ({"LIST_URI": "http://me:secret@host:5000"}, "http://me:secret@host:5000"),
    ],
)
def test_an_own_run_goes_on_where_it_was_opened(
    run: RunDirectory, backend: ListBackend, environment: dict[str, str], address: str
) -> None:
    UploadState(backend="list", own_run=Binding("own-before", "http://host:5000")).save(run)
    backend.environment = environment
    sync_output()
    assert the_target(backend).connection.uri == address


def test_a_run_that_no_tracker_has_yet_is_opened_where_the_environment_says(
    run: RunDirectory, backend: ListBackend
) -> None:
    backend.environment = {"LIST_URI": "http://other:5000"}
    sync_output()
    connection = the_target(backend).connection
    assert connection.uri is None
    assert connection.environment == {"LIST_URI": "http://other:5000"}


def strangers(run: RunDirectory, how: str, address: str = "http://evil") -> None:
    """Make the run's folder name this tracker."""
    match how:
        case "address":
            UploadState(backend="list", address=address).save(run)
        case "own run":
            UploadState(backend="list", own_run=Binding("own", address)).save(run)
        case "binding":
            segment = min(run.path.glob("trainer-*.jsonl"))
            text = segment.read_text()
            bound = f'"bindings":{{"list":{{"run_id":"users","uri":"{address}"}}}}'
            assert '"bindings":{}' in text
            segment.write_text(text.replace('"bindings":{}', bound, 1))


@pytest.mark.parametrize("how", ["address", "own run", "binding"])
@pytest.mark.parametrize("address", ["sqlite:////home/me/photos.db", "file:///home/me", "/home/me"])
def test_nothing_is_written_to_a_file_that_only_the_run_names(
    run: RunDirectory, backend: ListBackend, how: str, address: str
) -> None:
    strangers(run, how, address)
    line = complaint(code=1)
    assert line.startswith(f"list: the run names {address} as its tracker, but your environment ")
    assert line.endswith(f"--trust-address {address}")
    assert backend.tracker.opened == []
    sync_output("--trust-address", address)
    assert backend.tracker.opened


def test_nothing_is_written_to_a_tensorboard_folder_that_only_the_run_names(
    run: RunDirectory, backend: ListBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    folder = str(tmp_path / "photos")
    UploadState(backend="list", own_run=Binding(folder)).save(run)
    line = complaint(code=1)
    assert line.startswith(f"list: the run names {folder} as its tracker, but your environment ")
    assert line.endswith(f"--trust-address {folder}")
    assert backend.tracker.opened == []
    sync_output("--trust-address", folder)
    assert backend.tracker.opened


def test_a_tensorboard_folder_below_the_working_directory_needs_no_option(
    run: RunDirectory, backend: ListBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    UploadState(backend="list", own_run=Binding(str(tmp_path / "logs" / "1"))).save(run)
    sync_output()
    assert backend.tracker.opened


@pytest.mark.parametrize("how", ["address", "own run", "binding"])
def test_an_address_of_the_runs_alone_gets_no_credentials(
    run: RunDirectory, backend: ListBackend, how: str
) -> None:
    strangers(run, how)
    backend.environment = {"LIST_TOKEN": "secret"}
    line = complaint(code=1)
    assert line.startswith(
        "list: the run names http://evil as its tracker, but your environment names "
    )
    assert "credentials (LIST_TOKEN)" in line
    assert line.endswith("--trust-address http://evil")
    assert backend.tracker.opened == []
    sync_output("--trust-address", "http://evil")
    assert backend.tracker.opened


@pytest.mark.parametrize("how", ["address", "own run", "binding"])
def test_pull_sends_no_credentials_to_the_runs_address(
    run: RunDirectory, backend: ListBackend, tmp_path: Path, how: str
) -> None:
    strangers(run, how)
    backend.environment = {"LIST_TOKEN": "secret"}
    arguments = ["pull", run.id, "--backend", "list", "-o", str(tmp_path / "out")]
    result = commands.memlog(*arguments)
    assert result.exit_code != 0
    if how != "address":  # the tracker to which nothing was delivered yet
        assert "the run names http://evil" in result.stderr
    assert backend.connected == []
