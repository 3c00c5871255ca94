"""Noticing, in the trainer's process, the runs that the user opens in a tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memlog.delivery.messages import Bind, Connect, Message
from memlog.health import Health
from memlog.journal import Binding, JournalWriter
from memlog.redact import without_credentials
from memlog.sink import Backend, Connection, TrackerRun


class Binder:
    """Looks for active runs on the thread that publishes, since MLflow's active run is the thread's own.

    Args:
        backends: The backends to look in, by name.
        journal: Gets a new segment for each run that is found.
        tell: Tells the helper process how to reach it.
        health: Counts what a backend gets wrong.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        journal: JournalWriter,
        tell: Callable[[Message], None],
        health: Health,
    ) -> None:
        self._backends = backends
        self._journal = journal
        self._tell = tell
        self._health = health
        self._bound: dict[str, str] = {}
        self._connections: dict[str, Connection] = {}

    def look(self) -> bool:
        """Binds to runs that were opened since the last look: about a microsecond a backend. Never raises.

        Returns:
            Whether there was one.
        """
        bound = False
        for name, backend in self._backends.items():
            try:
                run = backend.active_run()
                if run is not None and run.run_id != self._bound.get(name):
                    self._bind(name, run)
                    bound = True
            except Exception as error:  # noqa: BLE001, PERF203 - a tracker's trouble is not the trainer's
                self._health.fault(f"looking for a run in {name}", error)
        return bound

    def glance(self) -> None:
        """Lets each backend see the run that is open now, without binding to it.

        A backend works out a run's address when it first sees it: before the user changes folders.
        """
        for name, backend in self._backends.items():
            with self._health.contained(f"looking for a run in {name}"):
                backend.active_run()

    def connect(self) -> None:
        """Tells the helper how each client would connect now: users set that after ``init``, too."""
        for name, backend in self._backends.items():
            with self._health.contained(f"finding out how {name} connects"):
                connection = backend.connection()
                if connection != self._connections.get(name):
                    self._connections[name] = connection
                    self._tell(Connect(name, connection))

    def _bind(self, name: str, run: TrackerRun) -> None:
        self._bound[name] = run.run_id
        self.connect()
        self._tell(Bind(name, run))
        uri = None if run.uri is None else without_credentials(run.uri)
        self._journal.bind(name, Binding(run.run_id, uri))
