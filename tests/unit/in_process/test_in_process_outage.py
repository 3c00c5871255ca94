"""The in-process writer while the server can't be reached: a file that waits delays nothing else."""

from collections.abc import Sequence
from pathlib import Path

from support.journals import MadeRun, at, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.events import Alert, Artifact
from memlog.in_process.writer import InProcessWriter
from memlog.sink import Point, Rows


class Away:
    """A run of the user's whose server takes rows and alerts, which wait, and no files."""

    run_id = "users"
    is_open = True

    def __init__(self) -> None:
        self.had: list[str] = []
        self.takes_files = False

    def watch_end(self, before: object, after: object) -> None: ...

    def watch_rows(self, rows: Rows) -> int | None:  # noqa: ARG002 - as a run's
        return None

    def leave_rows(self) -> None: ...

    def log(self, points: Sequence[Point], *, new_row: bool) -> None: ...

    def log_parameters(self, parameters: object) -> None: ...

    def log_alert(self, alert: Alert) -> None:
        self.had.append(alert.title)

    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None:  # noqa: ARG002 - as a run's
        if not self.takes_files:
            raise ConnectionError("nobody there")
        self.had.append(artifact.name)


def test_a_file_that_waits_for_the_server_holds_up_nothing_else(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True).bound("wandb", "users", None)
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
