"""The uploaders of one run in its helper process, each with a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from memlog.delivery.helper.training_process import StopTime
from memlog.events import End
from memlog.journal import RunDirectory
from memlog.settings import Settings
from memlog.sink import (
    LOCAL,
    WEBHOOK,
    Backend,
    find_backends,
    joins,
    load_backend,
    writes_in_process,
)

if TYPE_CHECKING:
    from memlog.delivery.uploader.retrying_worker import UploadWorker
    from memlog.delivery.uploader.uploader import Uploader

_POLL = 0.2
"""Seconds between two checks. Each check finds out if another process, such as ``memlog sync``, waits to
deliver the remaining data."""


class RunUploaders:
    """Uploaders of one run, one for each backend."""

    def __init__(self, run: RunDirectory, settings: Settings, begun_us: int) -> None:
        self._run = run
        self._settings = settings
        self._begun_us = begun_us
        self._workers: dict[str, UploadWorker] = {}
        self._delivers = True

    def __bool__(self) -> bool:
        """Return whether the run is delivered to a tracker."""
        return self._delivers and bool(self._workers.keys() - {WEBHOOK})

    def start_named(self) -> None:
        """Start an uploader for each tracker that the settings name."""
        for name in self._settings.backends:
            if name != LOCAL and name not in self._workers:
                self._start(name, load_backend(name), named=True)

    def of(self, name: str) -> Uploader:
        """Return the uploader of a backend. If the backend has no uploader yet, start one."""
        if name not in self._workers:
            self._start(name, find_backends()[name], named=False)
        return self._workers[name].uploader

    def allow_own_runs(self) -> None:
        """Let memlog open runs of its own. Call it if the user has not opened a run in time."""
        for name in self._settings.backends if self._delivers else ():
            if name in self._workers:
                self._workers[name].uploader.may_open_own = True

    def settle(self, backend: str, run_id: str, end: End, on_settled: Callable[[], object]) -> None:
        """Deliver and describe a user's run that ends, and then call ``on_settled``, on another thread."""
        worker = self._workers.get(backend) if self._delivers else None
        if worker is None:
            on_settled()
        else:
            worker.settle(run_id, end, on_settled)

    def set_end(self, end: End) -> None:
        for worker in self._workers.values():
            worker.uploader.end = end

    def lead(self, backends: tuple[str, ...], name: str | None) -> None:
        """Deliver to these trackers. Call it when this run turns out to be the lowest rank's run."""
        self._delivers = True
        self._settings = msgspec.structs.replace(self._settings, backends=backends, name=name)
        self.start_named()

    def leave(self) -> None:
        """Stop delivering. Call `leave` if this run's rank is not 0."""
        self._delivers = False

    def deliver_rest(self, stop: StopTime) -> bool:
        """Deliver all remaining data, and return whether everything was delivered in time."""
        if not self._delivers:
            return True
        self.allow_own_runs()
        workers = self._workers.values()
        for worker in workers:
            worker.complete()
        # If the user has deleted the run's folder, nothing is left to deliver.
        linger = self._settings.linger if self._run.path.exists() else 0
        deadline = time.monotonic() + linger
        for worker in workers:
            while not worker.join(_POLL):
                for other in workers:
                    other.stop_if_wanted()
                if time.monotonic() >= min(deadline, stop.at or deadline):
                    return False
        return all(worker.delivered for worker in workers)

    def _start(self, name: str, backend: Backend, *, named: bool) -> None:
        # Imported here: the imports would delay the first sample.
        from memlog.delivery.uploader.retrying_worker import UploadWorker  # noqa: PLC0415
        from memlog.delivery.uploader.uploader import Uploader  # noqa: PLC0415
        from memlog.journal.delivery_state import claims_while_in_process  # noqa: PLC0415

        uploader = Uploader(
            self._run,
            name,
            backend.open_sink,
            project=self._settings.project,
            name=self._settings.name,
            begun_us=self._begun_us,
            may_open_own=not joins(backend),
            claim=claims_while_in_process if writes_in_process(backend) else None,
        )
        # The client takes seconds to import. A backend that the settings name will need it, unless the
        # training process writes to the user's runs. Any other backend may never need it.
        worker = UploadWorker(
            uploader, backend.prepare if named and not writes_in_process(backend) else None
        )
        self._workers[name] = worker
        worker.start()
