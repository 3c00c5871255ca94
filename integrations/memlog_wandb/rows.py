"""Add memlog's values to the user's rows, in the user's own call.

The user's call ``log(values, step=k)`` opens row k. The user's first call for another step closes row k.
Between these calls, another thread can't know into which row its values would go. So memlog wraps one method
of the user's run. All logging calls go through this method, also ``wandb.log``, which W&B binds to the
run when the run opens. The wrapper logs the user's values and memlog's values in one call, on the user's
thread.
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
"""Prefixes of memlog's own names."""


class RowWatch:
    """Values that one session adds to the rows of a run.

    Args:
        run: The user's run.
        rows: Object that provides the points for each row.
    """

    def __init__(self, run: Any, rows: Rows) -> None:
        self.rows = rows
        self._run = run
        self._log = getattr(type(run), _METHOD).__get__(run)
        self._definitions = contents.Definitions(run)
        self._users: set[str] = set()

    def contents_of(self, points: Sequence[Point]) -> dict[str, Any]:
        """Return the points as a row's values. Leave out each point whose name the user logs."""
        kept = [
            point
            for point in points
            if contents.is_storable(point) and safe_key(point.name) not in self._users
        ]
        self._definitions.add(kept)
        row = contents.row_of(kept)
        return {key: value for key, value in row.items() if key not in self._users}

    def put(self, points: Sequence[Point], *, new_row: bool) -> None:
        """Log points to the open row. If ``new_row``, log them to a new row after the open row."""
        if row := self.contents_of(points):
            step = self._run._local_step + 1 if new_row else None  # noqa: SLF001 - `run.step` asks the server
            self._log(row, step, None if new_row else False)

    def learn(self, data: Mapping[str, Any]) -> None:
        """Remember the names that the user logs. After this call, memlog adds no values under these names."""
        for key in data:
            if key.startswith(_PREFIXES) and key not in self._users:
                self._users.add(key)
                logger.warning(
                    "memlog: you log %r yourself: your values stay, and memlog adds none under that name to "
                    "this run; `memlog show` has memlog's values",
                    key,
                )


class _LogWrapper:
    """Wrapper of the run's logging method. It adds memlog's values to the user's values."""

    def __init__(self, run: Any) -> None:
        self.watches: list[RowWatch] = []
        self._run = run
        self._log = getattr(run, _METHOD)

    def __call__(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        # memlog adds nothing in two cases. With commit=False and no step, the values wait for the next row,
        # whose step is not known yet. If the step is over, W&B takes no values for its row.
        is_part = step is None and commit is False
        is_past = step is not None and step < self._run._local_step  # noqa: SLF001 - `run.step` asks the server
        added: list[tuple[RowWatch, Sequence[Point]]] = []
        both: dict[str, Any] = {}
        for watch in tuple(self.watches):
            try:
                watch.learn(data)
                if not is_part and not is_past:
                    before, points = watch.rows.enter(step)
                    watch.put(before, new_row=False)
                    added.append((watch, points))
                    both |= watch.contents_of(points)
            except Exception as error:  # noqa: BLE001, PERF203 - the user's values are logged in any case
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


def watch(run: Any, rows: Rows) -> RowWatch:
    """Add memlog's points to the user's rows from now on. ``rows`` provides the points.

    Raises:
        TypeError: this version of wandb makes rows in an unknown way. The run is not changed.
    """
    wrapper = vars(run).get(_METHOD)
    if not isinstance(wrapper, _LogWrapper):
        _require_known(run)
        wrapper = _LogWrapper(run)
        setattr(run, _METHOD, wrapper)
    made = RowWatch(run, rows)
    wrapper.watches.append(made)
    return made


def _require_known(run: Any) -> None:
    """Raise if memlog can't wrap the logging method of this version of wandb."""
    method = getattr(run, _METHOD, None)
    known = inspect.signature(_LogWrapper.__call__).parameters
    if (
        not callable(method)
        or list(inspect.signature(method).parameters) != list(known)[1:]
        or not isinstance(getattr(run, "_local_step", None), int)
    ):
        import wandb  # noqa: PLC0415 - imported already, since there is a run

        raise TypeError(
            f"memlog can't add values to rows of wandb {wandb.__version__}, so your run has none of them"
        )


def unwatch(run: Any, made: RowWatch) -> None:
    """Stop adding a session's points. If no other session adds points, restore the run's own method."""
    wrapper = vars(run).get(_METHOD)
    if isinstance(wrapper, _LogWrapper) and made in wrapper.watches:
        wrapper.watches.remove(made)
        if not wrapper.watches:
            delattr(run, _METHOD)
