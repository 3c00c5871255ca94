"""The row of the user's that is ridden: what it holds, so that what follows is folded with it."""

from __future__ import annotations

from collections.abc import Iterable

from memlog.metrics import replaces
from memlog.sink import Axis, Point, Ride


class Row:
    """Folds what is put into one row of the user's: within a row the last write wins.

    What waits for a row is folded too, so that it stays small however long no run is open.

    Attributes:
        folded: Places on an axis whose values share a row with later ones.
    """

    def __init__(self) -> None:
        self.folded = 0
        self._waiting: dict[str, Point] = {}
        self._held: dict[str, Point] = {}
        self._token: object | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether there are points that no row has got yet."""
        return bool(self._waiting)

    def add(self, points: Iterable[Point]) -> None:
        """Takes points that the next row is to get."""
        new = list(points)
        self.folded += _shared(new, self._waiting)
        self._waiting = fold(self._waiting, new)

    def renew(self) -> None:
        """The user has opened the run anew: its rows have nothing to do with those before."""
        self._held, self._token = {}, None

    def ride(self, ride: Ride) -> None:
        """Puts what waits into the row, together with what it has got since the user's last commit.

        Where the user commits in the middle of it, nobody knows which row has got it: it is kept for
        the next one too, in which a peak is then seen again rather than lost.
        """
        token = ride.row()
        held = self._held if token is not None and token == self._token else {}
        both = fold(held, self._waiting.values())
        ride.log(list(both.values()))
        self.folded += _passed_over(self._waiting.values(), held)
        self._token = ride.row()
        self._held = both if self._token == token else self._waiting
        self._waiting = {}


def fold(held: dict[str, Point], points: Iterable[Point]) -> dict[str, Point]:
    """The points that one row gets: of each metric one, peaks the largest, levels the newest."""
    made = dict(held)
    for point in points:
        before = made.get(point.name)
        if before is None or replaces(point.fold, point.value, before.value):
            made[point.name] = point
    return made


def _shared(points: Iterable[Point], held: dict[str, Point]) -> int:
    """How many places on the axes give way to later ones, among new points and those that are held."""
    new: dict[Axis, set[int]] = {}
    for point in points:
        new.setdefault(point.axis, set()).add(point.index)
    return sum(len(indices) - 1 for indices in new.values()) + _passed_over(points, held)


def _passed_over(points: Iterable[Point], held: dict[str, Point]) -> int:
    """On how many axes new points go beyond those that are held, which then share their row."""
    before = _newest(held.values())
    after = _newest(points)
    return sum(1 for axis, index in after.items() if before.get(axis, index) < index)


def _newest(points: Iterable[Point]) -> dict[Axis, int]:
    newest: dict[Axis, int] = {}
    for point in points:
        newest[point.axis] = max(point.index, newest.get(point.axis, point.index))
    return newest
