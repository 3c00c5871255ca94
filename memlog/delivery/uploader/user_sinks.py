"""Deliver, in the training process, to sinks that the user passed as objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.uploader.retrying_worker import UploadWorker
from memlog.delivery.uploader.uploader import Uploader
from memlog.journal import RunDirectory
from memlog.sink import Sink, Target


def deliver_to(
    sinks: Sequence[Sink], run: RunDirectory, taken: Sequence[str], diagnostics: Diagnostics
) -> list[UploadWorker]:
    """Start an upload thread for each of the sinks, and return the threads that were started.

    ``taken`` has the names of other backends. No sink gets any of these names.
    """
    threads: list[UploadWorker] = []
    for name, sink in zip(_names(sinks, taken), sinks, strict=True):
        with diagnostics.contained(f"starting to deliver to {name}"):
            thread = UploadWorker(Uploader(run, name, _opener(sink), may_open_own=True))
            thread.start()
            threads.append(thread)
    return threads


def _opener(sink: Sink) -> Callable[[Target], Sink]:
    return lambda _: sink


def _names(sinks: Sequence[Sink], taken: Sequence[str]) -> list[str]:
    """Return a name for each sink: the name of its class, with a number if the name is taken."""
    names: list[str] = []
    for sink in sinks:
        name = base = type(sink).__name__.lower()
        number = 1
        while name in taken or name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names
