"""Adding memlog's values to what the user logs, in the same call.

W&B's rows are made by the user's calls: ``log(values, step=k)`` opens row k, and the next step's call
closes it. At any other moment than a call's, another thread can't know which row a value joins. So memlog
stands, on the one run that is the user's, before the method through which all calls pass (those of
``wandb.log``, too, which is bound as the run opens). It passes on what the user logs with memlog's values
beside it, on the same thread, in the same record.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from memlog.sink import Point, Rows
from memlog_wandb import contents
from memlog_wandb.names import safe_key

logger = logging.getLogger("memlog")

_METHOD = "_partial_history_callback"
_PREFIXES = ("memory/", "memlog/")
"""How memlog's own names begin."""


class RowWatch:
    """What one session adds to the rows of a run.

    Args:
        run: The user's run.
        rows: Says what.
    """

    def __init__(self, run: Any, rows: Rows) -> None:
        self.rows = rows
        self._run = run
        self._log = getattr(type(run), _METHOD).__get__(run)
        self._definitions = contents.Definitions(run)
        self._users: set[str] = set()

    def contents_of(self, points: Sequence[Point]) -> dict[str, Any]:
        """The points as a row has them, but for names under which the user logs."""
        kept = [
            point
            for point in points
            if contents.is_storable(point) and safe_key(point.name) not in self._users
        ]
        self._definitions.add(kept)
        row = contents.row_of(kept)
        return {key: value for key, value in row.items() if key not in self._users}

    def put(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Puts points into the row that is open, or into one behind it, without the user."""
        if row := self.contents_of(points):
            step = self._run._local_step + 1 if new_row else None  # noqa: SLF001 - `run.step` asks the server
            self._log(row, step, None if new_row else False)

    def learn(self, data: Mapping[str, Any]) -> None:
        """What the user logs is theirs from now on."""
        for key in data:
            if key.startswith(_PREFIXES) and key not in self._users:
                self._users.add(key)
                logger.warning(
                    "memlog: you log %r yourself: your values stay, and memlog adds none under that name to "
                    "this run; `memlog show` has its own",
                    key,
                )


class _Before:
    """Stands before the run's method.

    Args:
        run: The user's run.
    """

    def __init__(self, run: Any) -> None:
        self.watches: list[RowWatch] = []
        self._run = run
        self._log = getattr(run, _METHOD)

    def __call__(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        # Without a step and a commit, values wait for whatever row comes next; a row that has been passed by
        # takes nothing.
        is_part = step is None and commit is False
        is_past = step is not None and step < self._run._local_step  # noqa: SLF001 - `run.step` asks the server
        added: list[tuple[RowWatch, Sequence[Point]]] = []
        both: dict[str, Any] = {}
        for watch in tuple(self.watches):
            try:
                watch.learn(data)
                if not is_part and not is_past:
                    points = self._enter(watch, step)
                    added.append((watch, points))
                    both |= watch.contents_of(points)
            except Exception as error:  # noqa: BLE001, PERF203 - what the user logs is logged in any case
                watch.rows.failed(error)
        try:
            self._log({**both, **data} if both else data, step, commit)
        except BaseException:
            for watch, points in added:
                watch.rows.give_back(points)
            raise
        if commit or (step is None and commit is None):
            for watch, _ in added:
                watch.rows.leave()

    def _enter(self, watch: RowWatch, step: int | None) -> Sequence[Point]:
        before, points = watch.rows.enter(step)
        watch.put(before, new_row=False)
        return points


def watch(run: Any, rows: Rows) -> RowWatch:
    """Adds what ``rows`` says to what the user logs to a run, from now on.

    Raises:
        TypeError: it is no run as memlog knows them, and is left alone.
    """
    before = vars(run).get(_METHOD)
    if not isinstance(before, _Before):
        _require_known(run)
        before = _Before(run)
        setattr(run, _METHOD, before)
    made = RowWatch(run, rows)
    before.watches.append(made)
    return made


def _require_known(run: Any) -> None:
    """W&B promises neither the method nor the step: where either differs, the user's calls would fail."""
    method = getattr(run, _METHOD, None)
    known = inspect.signature(_Before.__call__).parameters
    if (
        not callable(method)
        or list(inspect.signature(method).parameters) != list(known)[1:]
        or not isinstance(getattr(run, "_local_step", None), int)
    ):
        import wandb  # noqa: PLC0415 - whoever has a run has imported it

        raise TypeError(
            f"memlog does not know how wandb {wandb.__version__} makes rows, and adds nothing to them"
        )


def watches_no_more(run: Any, made: RowWatch) -> None:
    """Ends that; the run is as it was when the last one has ended."""
    before = vars(run).get(_METHOD)
    if isinstance(before, _Before) and made in before.watches:
        before.watches.remove(made)
        if not before.watches:
            delattr(run, _METHOD)
