"""The in-process writer and runs that end, or are opened again with the same id."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.journals import MadeRun, at, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.delivery.run_pages import keep_report
from memlog.events import Alert, Artifact
from memlog.in_process.writer import INTERVAL, InProcessWriter, _Ending
from memlog.in_process.written_runs import ended_early
from memlog.journal import Binding, JournalWriter, RunDirectory, new_run
from memlog.journal.delivery_state import InProcessState
from memlog.sink import Point, Rows


class Users:
    """A run of the user's, with the attributes that the writer uses."""

    def __init__(self, run_id: str = "same") -> None:
        self.run_id = run_id
        self.is_open = True
        self.rows: list[dict[str, float]] = []
        self.artifacts: list[str] = []
        self.reports: list[str] = []

    def watch_end(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self.before, self.after = before, after

    def watch_rows(self, rows: Rows) -> int | None:
        self.users: Rows | None = rows
        return None

    def leave_rows(self) -> None:
        self.users = None

    def commit(self) -> None:
        if self.users is not None:
            _, points = self.users.enter(None)
            self.users.leave()
            self.log(points, new_row=False)

    def log(self, points: Sequence[Point], *, new_row: bool) -> None:  # noqa: ARG002 - the protocol's
        if points:
            self.rows.append({"step": max(point.index for point in points)})

    def log_parameters(self, parameters: object) -> None: ...
    def log_alert(self, alert: Alert) -> None: ...

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:  # noqa: ARG002 - the protocol's
        kept = self.reports if artifact.is_report else self.artifacts
        kept.append(file.read_text())

    def end(self) -> None:
        self.before()
        self.is_open = False
        self.after()


class Trainer:
    """A journal of a trainer's steps, and a writer that reads it."""

    def __init__(self, directory: Path) -> None:
        self.run: RunDirectory = new_run(directory)
        self.health = Diagnostics()
        self.journal = JournalWriter(
            self.run.path, run=self.run.id, role="trainer", begun_us=0, diagnostics=self.health
        )
        self.bus = EventBus(self.health)
        self.bus.subscribe(self.journal.append)
        self.writer = InProcessWriter(self.run, "tracker", self.bus.subscribe, self.health)

    def open(self, users: Users) -> None:
        self.writer.begin(users)
        self.journal.bind("tracker", Binding(users.run_id))

    def step(self, number: int, users: Users | None = None) -> None:
        """Publish one step; if ``users`` is a run, commit a row of the user's to this run."""
        self.bus.publish(batch(number, 2**30 + number))
        if users is not None:
            users.commit()

    def finish(self) -> InProcessState:
        """Return the saved state."""
        self.journal.close()
        self.writer.complete()
        assert self.writer.join(10)
        assert not self.health.faults
        state = InProcessState.load(self.run, "tracker")
        assert state is not None
        return state


def steps_in(series: str) -> set[int]:
    return {int(line.split(",")[1]) for line in series.splitlines()[1:]}


def test_steps_between_two_runs_go_to_the_new_one(tmp_path: Path) -> None:
    trainer, first, second = Trainer(tmp_path), Users(), Users()
    trainer.open(first)
    for number in range(3):
        trainer.step(number, first)
    first.end()
    for number in range(3, 6):
        trainer.step(number)
    time.sleep(2 * INTERVAL)  # the writer usually reads them before the run is opened again
    trainer.open(second)
    for number in range(6, 8):
        trainer.step(number, second)
    state = trainer.finish()
    assert second.rows == [{"step": 6}, {"step": 7}]
    (series,) = second.artifacts
    assert steps_in(series) == set(range(8))
    assert (state.stage, state.whole) == ("done", ["same"])
    assert state.folded >= 3


def test_steps_after_the_end_of_a_run_are_said_to_be_missing(tmp_path: Path) -> None:
    trainer, users = Trainer(tmp_path), Users()
    trainer.open(users)
    trainer.step(0, users)
    users.end()
    trainer.step(1)
    state = trainer.finish()
    assert (state.stage, state.whole) == ("waiting", [])
    assert "run same ended" in (state.problem or "")


def test_the_end_of_a_run_waits_for_its_last_steps(tmp_path: Path) -> None:
    trainer, users = Trainer(tmp_path), Users()
    trainer.open(users)
    for number in range(50):
        trainer.step(number)
    users.end()
    assert users.rows[-1] == {"step": 49}
    assert [steps_in(series) for series in users.artifacts] == [set(range(50))]
    assert trainer.finish().stage == "done"


def test_a_run_that_the_user_ends_first_has_a_report_and_lacks_nothing(tmp_path: Path) -> None:
    trainer, users = Trainer(tmp_path), Users()
    trainer.open(users)
    for number in range(5):
        trainer.step(number, users)
    users.end()
    [report] = users.reports
    assert "<h1" in report
    # The helper process makes the report of the whole run later, and no one can write it to this run.
    final = keep_report(trainer.run, "report.html")
    assert final is not None
    trainer.bus.publish(final)
    state = trainer.finish()
    assert (state.stage, state.whole) == ("done", ["same"])
    assert len(users.reports) == 1


def test_an_ending_run_waits_for_what_was_published(tmp_path: Path) -> None:
    """The writer's current pass has already read the journal, so the end must wait for the next pass."""
    trainer = Trainer(tmp_path)
    trainer.run.artifacts.mkdir()

    def keep(name: str) -> None:
        (trainer.run.artifacts / name).write_text(name)
        trainer.bus.publish(Artifact(1, name, "report", f"artifacts/{name}", len(name)))

    class Ended(threading.Event):
        def set(self) -> None:
            users.is_open = False
            super().set()

    class EndsMeanwhile(Users):
        def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:
            super().log_artifact(artifact, file, memlog_run)
            if artifact.name == "first":
                keep("second")
                trainer.writer._ending.append(_Ending(self, None, True, ended))

    users, ended = EndsMeanwhile(), Ended()
    trainer.open(users)
    keep("first")
    assert ended.wait(10)
    state = trainer.finish()
    assert users.artifacts == ["first", "second"]
    assert state.stage == "done"


class Away(Users):
    """A run of the user's whose server takes rows and alerts, which wait, and no files at first."""

    takes_files = False

    def __init__(self) -> None:
        super().__init__()
        self.had: list[str] = []

    def log_alert(self, alert: Alert) -> None:
        self.had.append(alert.title)

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:  # noqa: ARG002 - the protocol's
        if not self.takes_files:
            raise ConnectionError("nobody there")
        self.had.append(artifact.name)


def test_a_file_that_waits_for_the_server_holds_up_nothing_else(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True).bound("wandb", "same", None)
    (made.directory.artifacts).mkdir()
    (made.directory.artifacts / "notes.txt").write_text("kept")
    user_run, health = Away(), Diagnostics()
    writer = InProcessWriter(made.directory, "wandb", EventBus(health).subscribe, health)
    writer._newest = writer._runs.add(user_run)  # without the thread that `begin` starts
    made.write(Artifact(at(0), "notes.txt", "report", "artifacts/notes.txt", 4), batch(0, 2**20))
    writer._write_once()
    made.write(batch(1, 2**20), Alert(at(1), 1, "error", "rule", "high", "text"), batch(2, 2**20))
    writer._write_once()
    assert user_run.had == ["high"]
    assert sum(health.faults.values()) == 2
    user_run.takes_files = True
    writer._write_once()
    writer._write_once()
    assert user_run.had[1:] == ["notes.txt"]


def test_a_message_names_five_runs_at_most() -> None:
    message = ended_early([f"r{number}" for number in range(7)], "memlog sync x")
    assert message.startswith("runs r0, r1, r2, r3, r4 and 2 more ended before memlog had written")
    assert message.endswith("`memlog sync x` delivers the whole series to a new run for each")
