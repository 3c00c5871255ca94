"""Saved state of an in-process writer, and its meaning for uploaders.

Some trackers (W&B) let only the training process write to the user's run. Then the uploader, in another
process, skips the events of that run. memlog never writes to a run that the user has finished. If such a run
lacks data, ``memlog sync`` opens another run in the tracker and delivers everything to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from memlog._internal.safe_files import read_plain, replacing
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import MAX_STATE, Stage, UploadState, read_states
from memlog.journal.format import UNDECODABLE

Claim: TypeAlias = Literal["in process", "whole", "missing"]
"""State of a user's run. ``in process``: the training process writes to the run, or still can. ``whole``:
the run has all data. ``missing``: the run lacks data."""
ClaimOf: TypeAlias = Callable[[str], Claim]

_SUFFIX = ".ride"
"""Suffix of the saved file. Earlier versions wrote this suffix, so it stays."""


class InProcessState(msgspec.Struct, kw_only=True):
    """State of the in-process writer that writes one session's data to the user's runs in one backend."""

    backend: str
    stage: Stage = "delivering"
    problem: str | None = None
    joined: list[str] = []
    """Ids of the user's runs to which the writer has written."""
    whole: list[str] = []
    """Ids of the user's runs for which no data is left to deliver. The reason is one of three: the run has
    all data, memlog opened another run and delivered the data to it, or the user has disabled the run."""
    delivered: int = 0
    """Number of points put into rows. If several steps share a row, the points of each step count."""
    folded: int = 0
    """Number of steps, evaluations and epochs without a complete row of their own. For example, a step shares
    its row with a later step, or one of the step's values came after the row was closed."""
    dropped: dict[str, int] = {}

    # Constants with the names of attributes of `UploadState`, for code that reads both kinds of state.
    own_run: None = None
    provisional: int = 0

    def save(self, run: RunDirectory) -> None:
        with replacing(run.path, f"{run.delivery.name}/{self.backend}{_SUFFIX}") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @staticmethod
    def load(run: RunDirectory, backend: str) -> InProcessState | None:
        """Return the saved state; ``None`` if no state can be read.

        If the trainer died before the writing had ended, `problem` says that the run may lack data.
        """
        try:
            kept = read_plain(run.path, f"{run.delivery.name}/{backend}{_SUFFIX}", MAX_STATE)
            state = msgspec.json.decode(kept, type=InProcessState)
        except (OSError, ValueError, *UNDECODABLE):
            return None
        if state.stage == "delivering" and not run.is_alive():
            state.stage = "waiting"
            state.problem = (
                "the trainer's process ended before memlog had written everything, so the run may lack data: "
                f"`{run.command('sync')}` delivers the whole series to a new run"
            )
        return state

    def mark_delivered(self, run: RunDirectory) -> None:
        """Save the stage ``done``. A run that memlog opened has the data of all runs in ``joined``."""
        self.whole = list(self.joined)
        self.stage, self.problem = "done", None
        self.save(run)


def all_states(run: RunDirectory) -> list[UploadState | InProcessState]:
    backends = sorted(path.stem for path in run.delivery.glob(f"*{_SUFFIX}"))
    in_process = (InProcessState.load(run, name) for name in backends)
    return [*(state for state in in_process if state is not None), *read_states(run)]


def claims_while_in_process(_run_id: str) -> Claim:
    """Return ``in process`` for every user's run.

    The helper process uses this function, because the training process writes to these runs.
    """
    return "in process"


def claims_of(run: RunDirectory, backend: str, *, complete: bool) -> ClaimOf:
    """Return a function that returns the state of a user's run, for use by ``memlog sync``.

    ``complete`` is True if the trainer has ended.
    """
    state = InProcessState.load(run, backend)
    whole = frozenset(state.whole if state else ())

    def claim(run_id: str) -> Claim:
        if run_id in whole:
            return "whole"
        return "missing" if complete else "in process"

    return claim
