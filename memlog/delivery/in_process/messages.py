"""Messages about runs that are written in process: printed, and shown by ``memlog show``."""

from __future__ import annotations

from collections.abc import Sequence

from memlog.delivery.in_process.series_csv import SERIES_KIND

_NAMED = 5
"""Runs that a message names, at most."""


def shared_rows(folded: int, run_id: str, name: str) -> str:
    """Say that the user's rows don't have every step, and where every step is."""
    steps = "1 step shares" if folded == 1 else f"{folded:,} steps share"
    return (
        f"{steps} a row of run {run_id} with a later one, since you log less often than you step: peaks "
        f"are kept, and the artifact {name} ({SERIES_KIND}) has every step"
    )


def kept_nowhere(run_ids: Sequence[str]) -> str:
    """Say that runs have nothing of the recording, because the user disabled them."""
    is_disabled = "is disabled: nothing is" if len(run_ids) == 1 else "are disabled: nothing is"
    return (
        f"{_named(run_ids)} {is_disabled} kept there; memlog's own folder of the run has every step"
    )


def _named(run_ids: Sequence[str]) -> str:
    named = ", ".join(run_ids[:_NAMED])
    if len(run_ids) > _NAMED:
        named += f" and {len(run_ids) - _NAMED:,} more"
    return f"run {named}" if len(run_ids) == 1 else f"runs {named}"


def ended_early(run_ids: Sequence[str], memlog_run: str) -> str:
    """Say that runs lack data, and which command delivers it."""
    each = "it" if len(run_ids) == 1 else "each"
    return (
        f"{_named(run_ids)} ended before everything was there: `memlog sync {memlog_run}` brings the whole "
        f"series, as a run beside {each}"
    )
