"""Values in the rows of a user's run, for every order of logging and stepping."""

from pathlib import Path

import pytest
from support.journals import at, batch, finished_run

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Loss, Sample
from memlog.in_process.row_buffer import UsersRows, write_series
from memlog.journal import RunDirectory

MIB = 2**20
RSS, TREE, LOSS = "memory/host/rss_mib", "memory/host/tree_mib", "memory/step/loss"


class Users:
    """A user's run, and the values of each row by its number."""

    def __init__(self, opened: int | None = None) -> None:
        self.rows = UsersRows(Diagnostics())
        self.rows.open(opened)
        self.has: dict[int, dict[str, float]] = {}
        self._row = 0 if opened is None else opened

    def step(self, number: int, mib: int = 100) -> None:
        self.rows.receive(batch(number, mib * MIB))

    def sample(self, step: int, mib: int) -> None:
        self.rows.add(Sample(at(step), step, mib * MIB, None, None, None, None))

    def log(self, number: int | None = None) -> None:
        before, points = self.rows.enter(number)
        self._write(self._row, before)
        self._row = self._row if number is None else number
        self._write(self._row, points)
        if number is None:
            self.rows.leave()
            self._row += 1

    def end(self) -> None:
        self._write(self._row, self.rows.take_for_open_row())
        self._write(self._row + 1, self.rows.take_for_new_row())

    def steps(self) -> dict[int, float]:
        return {number: row["step"] for number, row in self.has.items()}

    def _write(self, number: int, points: object) -> None:
        row = self.has.setdefault(number, {})
        for point in points:  # type: ignore[attr-defined] # any object with points
            row[point.name], row[point.axis] = point.value, point.index
        if not row:
            del self.has[number]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_row_that_is_logged_after_its_step_has_that_step(numbered: bool) -> None:
    users = Users()
    for number in range(30):
        users.step(number, 150 if number == 15 else 100)
        users.log(number if numbered else None)
    assert users.steps() == {number: number for number in range(30)}
    assert [number for number, row in users.has.items() if row[RSS] == 150] == [15]
    assert users.rows.folded == 0


def test_a_row_logged_before_its_step_gets_it() -> None:
    users = Users(opened=0)  # the user has logged step 0 when memlog's event for it comes
    for number in range(30):
        if number:
            users.log(number)
        users.step(number, 150 if number == 15 else 100)
    users.end()
    assert users.steps() == {number: number for number in range(30)}
    assert [number for number, row in users.has.items() if row[RSS] == 150] == [15]
    assert users.rows.folded == 0


def test_a_late_sample_joins_the_open_row() -> None:
    users = Users(opened=0)
    for number in range(5):
        if number:
            users.log(number)
        users.step(number)
        if number == 4:
            users.sample(2, 300)  # the helper was slow: row 4 is open when this one is read
    users.end()
    assert users.steps() == {number: number for number in range(5)}
    assert users.has[4][TREE] == 300


def test_steps_logged_after_an_evaluation_are_in_their_rows() -> None:
    users = Users(opened=0)
    for number in range(5):
        users.step(number)
        users.log(number)
    assert users.steps() == {number: number for number in range(5)}


def test_rows_that_the_user_numbers_otherwise_get_what_is_over_as_they_log() -> None:
    users = Users()
    for number in range(10):
        users.step(number)
        users.log(number + 1)
    assert users.steps() == {number + 1: number for number in range(10)}
    epochs = Users()
    for number in range(10):
        epochs.step(number, 200 if number == 3 else 100)
        epochs.log(number // 5)  # logged to at every step
    assert epochs.steps() == {0: 4, 1: 9}
    assert [row["memory/host/rss_peak_mib"] for row in epochs.has.values()] == [200, 100]


def test_a_sparse_row_has_the_peak_since_the_one_before() -> None:
    users = Users()
    for number in range(101):
        users.step(number, 200 if number == 30 else 100)
        if number % 50 == 0:
            users.log(number)
    assert users.steps() == {0: 0, 50: 50, 100: 100}
    assert [row["memory/host/rss_peak_mib"] for row in users.has.values()] == [100, 200, 100]
    assert {row[RSS] for row in users.has.values()} == {100}
    assert users.rows.folded == 98


def test_what_follows_the_last_row_gets_one_of_its_own() -> None:
    users = Users()
    for number in range(53):
        users.step(number)
        if number % 50 == 0:
            users.log(number)
    users.end()
    assert users.steps() == {0: 0, 50: 50, 51: 52}
    dense = Users()
    for number in range(3):
        dense.step(number)
        dense.log(number)
    dense.sample(2, 300)
    dense.end()
    assert dense.steps() == {0: 0, 1: 1, 2: 2}
    assert dense.has[2][TREE] == 300


def test_what_comes_late_goes_into_its_own_row_while_that_is_open() -> None:
    users = Users()
    users.step(0)
    users.log(0)
    users.sample(0, 300)
    users.rows.add(Loss(at(0), 0, 7.0))
    users.step(1)
    users.log(1)
    assert (users.has[0][TREE], users.has[0][LOSS], users.has[0]["step"]) == (300, 7.0, 0)
    assert TREE not in users.has[1]
    assert users.rows.folded == 0


def test_late_peaks_go_into_the_next_row_and_levels_into_none() -> None:
    users = Users()
    users.step(0)
    users.log()
    users.sample(0, 300)
    users.rows.add(Loss(at(0), 0, 7.0))
    users.step(1)
    users.log()
    assert (users.has[1][TREE], users.has[1]["step"]) == (300, 1)
    assert all(LOSS not in row for row in users.has.values())
    assert users.rows.folded == 1


def test_a_row_without_news_gets_nothing() -> None:
    users = Users()
    users.step(0)
    users.log()
    users.log()
    assert list(users.has) == [0]


def test_what_a_row_could_not_get_waits_for_the_next() -> None:
    rows = UsersRows(Diagnostics())
    rows.receive(batch(0, 200 * MIB))
    _, points = rows.enter(0)
    rows.give_back(points)
    rows.receive(batch(1, 100 * MIB))
    _, points = rows.enter(1)
    values = {point.name: point.value for point in points}
    assert values == {RSS: 100, "memory/host/rss_peak_mib": 200}


@pytest.mark.parametrize("when", ["as it fails", "after it"])
def test_values_of_a_refused_row_join_no_earlier_one(when: str) -> None:
    users = Users()
    for number in range(4):
        users.step(number)
        users.log(number)
    users.step(4)
    _, points = users.rows.enter(4)
    if when == "as it fails":
        users.sample(4, 300)
    users.rows.give_back(points)
    if when == "after it":
        users.sample(4, 300)
    users.step(5)
    users.log(5)
    assert users.steps() == {0: 0, 1: 1, 2: 2, 3: 3, 5: 5}


def test_a_failed_step_logged_first_is_in_the_next_row() -> None:
    users = Users(opened=0)
    for number in range(4):
        if number:
            users.log(number)
        users.step(number)
    before, points = users.rows.enter(4)
    users._write(3, before)
    users.rows.give_back(points)
    users.step(4)
    users.log(5)
    users.step(5)
    users.end()
    assert users.steps() == {0: 0, 1: 1, 2: 2, 3: 3, 5: 5}


def test_received_events_are_folded_even_if_no_row_takes_them() -> None:
    rows = UsersRows(Diagnostics())
    for number in range(10_000):
        rows.receive(batch(number, MIB))
    assert len(rows._received) < 1000


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


@pytest.mark.parametrize("opened", [None, 30])
def test_steps_take_the_users_number_of_the_first_row(opened: int | None) -> None:
    """The user resumes at step 30 and logs each row after its step, or before it and before memlog."""
    users = Users(opened)
    numbered: list[int] = []

    def number_first(number: int | None, _: int | None) -> int:
        assert number is not None
        numbered.append(number)
        return number

    users.rows.number_first = number_first
    for number in range(5):
        if opened is not None and number:
            users.log(opened + number)
        users.step(number + sum(numbered))
        if opened is None:
            users.log(30 + number)
    users.end()
    assert users.steps() == {number: number for number in range(30, 35)}
    assert numbered == [30]
