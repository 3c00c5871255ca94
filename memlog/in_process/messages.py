"""Messages about the runs that the in-process writer writes to: printed, and shown by ``memlog show``."""

from __future__ import annotations

from collections.abc import Sequence

from memlog.in_process.series_csv import SERIES_KIND

_NAMED = 5
"""Maximum number of runs that a message names."""


def shared_rows(folded: int, run_id: str, name: str) -> str:
    """Return a message: some steps share rows with later steps, and the file ``name`` has every step."""
    steps = "1 step shares" if folded == 1 else f"{folded:,} steps share"
    return (
        f"{steps} a row of run {run_id} with a later one, because the run has fewer rows than steps: the "
        f"row has the highest peaks, and the artifact {name} ({SERIES_KIND}) has every step"
    )


def copied_rows(run_id: str, name: str) -> str:
    """Return a message: the tracker's client copies rows from another tracker's files, without memlog."""
    return (
        f"run {run_id} gets its rows from another tracker's files (W&B: sync_tensorboard=True), and memlog "
        "can't add values to those rows: only rows that you log yourself, or one row of memlog's, have "
        f"memory. The artifact {name} ({SERIES_KIND}) has every step"
    )


def kept_nowhere(run_ids: Sequence[str]) -> str:
    """Return a message: the user disabled these runs, so the tracker has no data of the runs."""
    are = "is" if len(run_ids) == 1 else "are"
    return f"{_named(run_ids)} {are} disabled, so only memlog's folder of the run has its steps"


def _named(run_ids: Sequence[str]) -> str:
    named = ", ".join(run_ids[:_NAMED])
    if len(run_ids) > _NAMED:
        named += f" and {len(run_ids) - _NAMED:,} more"
    return f"run {named}" if len(run_ids) == 1 else f"runs {named}"


def ended_early(run_ids: Sequence[str], sync: str) -> str:
    """Return a message: the runs lack data, and the command ``sync`` delivers all steps to new runs."""
    new = "a new run" if len(run_ids) == 1 else "a new run for each"
    return (
        f"{_named(run_ids)} ended before memlog had written everything: `{sync}` delivers "
        f"the whole series to {new}"
    )
