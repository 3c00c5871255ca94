"""What one row of the user's holds, when several steps share it."""

from collections.abc import Sequence
from pathlib import Path

from support.journals import batch, finished_run

from memlog.delivery.row import Row
from memlog.delivery.series import write_series
from memlog.events import Alert, Artifact
from memlog.journal import RunDirectory
from memlog.sink import Fold, Point


class Users:
    """A run of the user's, as far as rows go."""

    run_id = "u"
    is_open = True

    def __init__(self, *, tells: bool = True) -> None:
        self.committed = 0
        self.commit_during_log = False
        self.rows: list[dict[str, float]] = [{}]
        self._tells = tells

    def commit(self) -> None:
        self.committed += 1
        self.rows.append({})

    def row(self) -> object | None:
        return self.committed if self._tells else None

    def log(self, points: Sequence[Point]) -> None:
        self.rows[-1].update({point.name: point.value for point in points})
        if self.commit_during_log:
            self.commit()

    def watch_end(self, before: object, after: object) -> None: ...
    def log_parameters(self, parameters: object) -> None: ...
    def log_alert(self, alert: Alert) -> None: ...
    def log_artifact(self, artifact: Artifact, file: Path, memlog_run: str) -> None: ...


def put(row: Row, users: Users, points: Sequence[Point]) -> None:
    row.add(points)
    row.ride(users)


def point(step: int, value: float, fold: Fold = "max") -> Point:
    return Point(fold, value, "step", step, step, fold)


def test_peaks_keep_their_maximum_and_levels_their_newest_within_a_row() -> None:
    users, row = Users(), Row()
    put(row, users, [point(0, 9), point(0, 9, "last"), point(1, 3), point(1, 3, "last")])
    put(row, users, [point(2, 5), point(2, 5, "last")])
    assert users.rows == [{"max": 9, "last": 5}]
    assert row.folded == 2


def test_a_committed_row_begins_anew() -> None:
    users, row = Users(), Row()
    put(row, users, [point(0, 9)])
    users.commit()
    put(row, users, [point(1, 3)])
    assert users.rows == [{"max": 9}, {"max": 3}]
    assert row.folded == 0


def test_a_commit_in_the_middle_of_a_ride_loses_no_peak() -> None:
    users, row = Users(), Row()
    users.commit_during_log = True
    put(row, users, [point(0, 9)])
    users.commit_during_log = False
    put(row, users, [point(1, 3)])
    assert users.rows == [{"max": 9}, {"max": 9}]


def test_where_rows_can_not_be_told_apart_each_ride_is_folded_alone() -> None:
    users, row = Users(tells=False), Row()
    put(row, users, [point(0, 9), point(1, 4)])
    put(row, users, [point(2, 3)])
    assert users.rows == [{"max": 3}]


def test_a_series_has_every_point_of_the_segments_that_belong(tmp_path: Path) -> None:
    run: RunDirectory = finished_run(tmp_path)
    artifact = write_series(run, "series u.csv", lambda header: "mlflow" in header.bindings)
    assert (artifact.name, artifact.kind) == ("series_u.csv", "series")
    lines = (run.path / artifact.path).read_text().splitlines()
    steps = [line for line in lines if ",memory/host/rss_mib," in line]
    assert [int(line.split(",")[1]) for line in steps] == list(range(200))
    assert steps[3].endswith(f",{(batch(3, 1024**3 + 3 * 1024**2).rss or 0) / 1024**2!r}")
    nothing = write_series(run, "none.csv", lambda _: False)
    assert len((run.path / nothing.path).read_text().splitlines()) == 1
