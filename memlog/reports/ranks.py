"""Runs of the ranks of one distributed training."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from memlog.events import Parameters
from memlog.journal import RunDirectory, list_runs

_BEGUN_WITHIN = 120.0
"""Seconds within which the ranks of one training begin."""
_FIRST_EVENTS = 50
"""Events of a trainer among which its parameters stand, unless it did other things before its first step."""
_MOST = 64
"""Most ranks that are followed."""


def ranks_of(run: RunDirectory) -> dict[int, RunDirectory]:
    """Return the runs of all ranks of the training to which a run belongs, by rank.

    Ranks belong together if their launcher's run id and the number of ranks are the same, and they began
    within two minutes. The result is empty if the run trains alone, or before its first step.
    """
    own = _place(run)
    if own is None:
        return {}
    rank, job = own
    found: dict[int, RunDirectory] = {rank: run}
    begun = run.begun()
    near = [other for other in list_runs(run.path.parent) if other.id != run.id]
    near.sort(key=lambda other: abs(other.begun() - begun))
    for other in near:
        if abs(other.begun() - begun) > _BEGUN_WITHIN or len(found) >= _MOST:
            break
        place = _place(other)
        if place is not None and place[1] == job:
            found.setdefault(place[0], other)
    return dict(sorted(found.items()))


def _place(run: RunDirectory) -> tuple[int, tuple[str | None, str]] | None:
    """Return a run's rank, and what its training is known by; ``None`` if it trains alone."""
    values = _parameters(run)
    rank, size = values.get("rank", ""), values.get("world_size", "")
    if not (rank.isdecimal() and size.isdecimal() and int(size) > 1):
        return None
    return int(rank), (values.get("torchelastic_run_id"), size)


def _parameters(run: RunDirectory) -> Mapping[str, str]:
    for file in run.files():
        if file.process.startswith("trainer"):
            for entry in islice(file.read(), _FIRST_EVENTS):
                if isinstance(entry.event, Parameters):
                    return entry.event.values
    return {}
