"""The names by which a run is known: memlog's id, the name passed to ``init``, ids and names in trackers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from memlog._internal.redact import without_credentials
from memlog.events import Run
from memlog.journal.delivery_state import read_states
from memlog.journal.format import Binding
from memlog.journal.runs import RunDirectory

_FIRST_EVENTS = 5
"""Number of the trainer's first events among which memlog looks for the `Run` event."""


def names_of(run: RunDirectory) -> list[str]:
    """Return the name passed to ``init``, then the run's names in trackers, then its ids in trackers.

    Each text is returned only once.
    """
    opened = [state.own_run for state in read_states(run) if state.own_run is not None]
    bindings = [*_joined(run), *opened]
    names = [
        _given(run),
        *(binding.name for binding in bindings),
        *(binding.run_id for binding in bindings),
    ]
    return list(dict.fromkeys(without_credentials(name) for name in names if name))


def tracker_runs(run: RunDirectory) -> dict[str, Binding]:
    """Return the user's run that memlog joined last, for each backend.

    If memlog joined no user's run in a backend, return the run that memlog opened there.
    """
    runs = {state.backend: state.own_run for state in read_states(run) if state.own_run is not None}
    # The trainer's headers suffice: the helper process knows no more about a run.
    for file in run.files("trainer"):
        for header in file.headers():
            runs.update(header.bindings)
    return runs


def _given(run: RunDirectory) -> str | None:
    for file in run.files("trainer"):
        events = (entry.event for entry in islice(file.read(), _FIRST_EVENTS))
        return next((event.name for event in events if isinstance(event, Run)), None)
    return None


def _joined(run: RunDirectory) -> Iterable[Binding]:
    """Yield the user's runs. The segments' headers name all of them, as each run begins a new segment."""
    for file in run.files():
        for header in file.headers():
            yield from header.bindings.values()
