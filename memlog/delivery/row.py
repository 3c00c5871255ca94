"""The row of the user's that is ridden: what it holds, so that what follows is folded with it."""

from __future__ import annotations

from collections.abc import Iterable

from memlog.metrics import replaces
from memlog.sink import Axis, Point, Ride


class Row:
    """Folds what is put into one row of the user's: within a row the last write wins.

    Attributes:
        folded: Places on an axis whose values share a row with later ones.
    """

    def __init__(self) -> None:
        self.folded = 0
        self._held: dict[str, Point] = {}
        self._token: object | None = None

    def ride(self, ride: Ride, points: Iterable[Point]) -> None:
        """Puts points into the row, together with what it has got since the user's last commit.

        Where the user commits in the middle of it, nobody knows which row has got them: they are kept
        for the next one too, in which a peak is then seen again rather than lost.
        """
        token = ride.row()
        held = self._held if token is not None and token == self._token else {}
        new = fold({}, points)
        ride.log(list(fold(held, new.values()).values()))
        self.folded += _shared(points, held)
        self._token = ride.row()
        self._held = fold(held, new.values()) if self._token == token else new


def fold(held: dict[str, Point], points: Iterable[Point]) -> dict[str, Point]:
    """The points that one row gets: of each metric one, peaks the largest, levels the newest."""
    made = dict(held)
    for point in points:
        before = made.get(point.name)
        if before is None or replaces(point.fold, point.value, before.value):
            made[point.name] = point
    return made


def _shared(points: Iterable[Point], held: dict[str, Point]) -> int:
    """How many places on the axes give way to later ones in this row."""
    new: dict[Axis, set[int]] = {}
    for point in points:
        new.setdefault(point.axis, set()).add(point.index)
    old = {(point.axis, point.index) for point in held.values()}
    shared = 0
    for axis, indices in new.items():
        before = {index for place, index in old if place == axis}
        shared += len(indices) - 1 + (1 if before and max(before) < max(indices) else 0)
    return shared
