"""State of writing to the user's runs, kept on disk, and what it means for uploaders.

A run of the user's that can be written only beside the user (W&B's) is written in the trainer's process. A
uploader, which lives in another one, passes over what belongs to it; ``memlog sync`` delivers it to a run
of memlog's own if that writing did not come to a clean end, since a run that the user has finished is never
written to.
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
"""Of a run of the user's: it is, or may still be, written in process; it has everything; it has not."""
ClaimOf: TypeAlias = Callable[[str], Claim]

_SUFFIX = ".ride"


class InProcessState(msgspec.Struct, kw_only=True):
    """What one session has written to one backend's runs in process."""

    backend: str
    stage: Stage = "delivering"
    problem: str | None = None
    joined: list[str] = []
    """Ids of the user's runs that were written."""
    whole: list[str] = []
    """Those of them that have everything, or whose whole series was delivered beside them since, or of
    which the tracker keeps nothing."""
    delivered: int = 0
    """Points handed over, before folding."""
    folded: int = 0
    """Steps that share a row of the user's with a later one."""
    dropped: dict[str, int] = {}

    own_run: None = None
    provisional: int = 0

    def save(self, run: RunDirectory) -> None:
        """Replaces what was kept before."""
        with replacing(run.path, f"{run.delivery.name}/{self.backend}{_SUFFIX}") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @staticmethod
    def load(run: RunDirectory, backend: str) -> InProcessState | None:
        """What was kept; ``None`` if nothing was written in process.

        Of a trainer that died before it was done, that what the tracker has is not certain.
        """
        try:
            kept = read_plain(run.path, f"{run.delivery.name}/{backend}{_SUFFIX}", MAX_STATE)
            state = msgspec.json.decode(kept, type=InProcessState)
        except (OSError, ValueError, *UNDECODABLE):
            return None
        if state.stage == "delivering" and not run.is_alive():
            state.stage = "waiting"
            state.problem = (
                "the trainer's process ended before everything was written, so what the run has is not "
                "certain: "
                f"`memlog sync {run.id}` brings the whole series, as a run beside it"
            )
        return state

    def made_good(self, run: RunDirectory) -> None:
        """The whole series of every run has been delivered beside it."""
        self.whole = list(self.joined)
        self.stage, self.problem = "done", None
        self.save(run)


def read_in_process_states(run: RunDirectory) -> list[InProcessState]:
    """The kept states of every backend."""
    backends = sorted(path.stem for path in run.delivery.glob(f"*{_SUFFIX}"))
    return [state for name in backends if (state := InProcessState.load(run, name)) is not None]


def all_states(run: RunDirectory) -> list[UploadState | InProcessState]:
    """The states of all uploaders and all in-process writers of a run."""
    return [*read_in_process_states(run), *read_states(run)]


def claims_while_in_process(_run_id: str) -> Claim:
    """For the helper process, beside which the trainer writes."""
    return "in process"


def claims_of(run: RunDirectory, backend: str, *, complete: bool) -> ClaimOf:
    """For ``memlog sync``: whether a run of the user's has everything.

    Args:
        run: The run.
        backend: The backend that is written in process.
        complete: Whether the trainer is gone.
    """
    state = InProcessState.load(run, backend)
    whole = frozenset(state.whole if state else ())

    def claim(run_id: str) -> Claim:
        if run_id in whole:
            return "whole"
        return "missing" if complete else "in process"

    return claim
