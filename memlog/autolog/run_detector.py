"""Detection, in the trainer's process, of runs that the user opens in a tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import remember
from memlog.delivery.helper.protocol import Bind, Connect, Message
from memlog.delivery.in_process.writer import InProcessWriter
from memlog.journal import Binding, JournalWriter, binding_of
from memlog.sink import DISABLED, Backend, Connection, InProcessBackend, TrackerRun


@dataclass(eq=False)
class RunDetector:
    """Search for active runs on the publishing thread, because MLflow's active run belongs to a thread."""

    _backends: Mapping[str, Backend]
    _journal: JournalWriter
    _tell: Callable[[Message], None]
    """Sends the helper process a message on how to reach the run."""
    _diagnostics: Diagnostics
    _writers: Mapping[str, InProcessWriter] = field(default_factory=dict)
    _on_in_process: Callable[[], object] = int
    """Called on the publishing thread whenever a writer joins a run."""
    _on_joined: Callable[[str, Binding], object] = lambda *_: None
    """Called on the publishing thread with each run that was joined, and its backend's name."""
    _bound: dict[str, str] = field(default_factory=dict, init=False)
    _connections: dict[str, Connection] = field(default_factory=dict, init=False)

    def join_new_runs(self) -> bool:
        """Join runs that were opened since the last call, in about a microsecond per backend. Never raises.

        Returns:
            True if there was one.
        """
        joined = False
        for name, backend in self._backends.items():
            try:
                run = backend.active_run()
                if run is not None and self._is_new(name, run):
                    self._bind(name, run)
                    joined = True
            except Exception as error:  # noqa: BLE001, PERF203 - a tracker's error must not reach the trainer
                self._diagnostics.fault(f"looking for a run in {name}", error)
        return joined

    def resolve_active_runs(self) -> None:
        """Ask each backend for its active run without joining it.

        A backend resolves a run's address when it first sees the run. This must happen before the user
        changes the working directory.
        """
        for name, backend in self._backends.items():
            with self._diagnostics.contained(f"looking for a run in {name}"):
                backend.active_run()

    def connect(self) -> None:
        """Send the helper process each client's connection data. Users may set it after ``init``."""
        for name, backend in self._backends.items():
            with self._diagnostics.contained(f"finding out how {name} connects"):
                connection = backend.connection()
                if connection != self._connections.get(name):
                    self._connections[name] = connection
                    remember(connection.uri, *connection.environment.values())
                    self._tell(Connect(name, connection))

    def _is_new(self, name: str, run: TrackerRun) -> bool:
        if run.run_id != self._bound.get(name):
            return True
        writer = self._writers.get(name)
        return writer is not None and writer.is_over(run.run_id)

    def _bind(self, name: str, run: TrackerRun) -> None:
        self._bound[name] = run.run_id
        self.connect()
        remember(run.uri)
        binding = binding_of(run)
        writer, backend = self._writers.get(name), self._backends[name]
        if writer is not None and isinstance(backend, InProcessBackend):
            writer.begin(backend.open_in_process(run), kept=binding.uri != DISABLED)
            self._on_in_process()
            written = TrackerRun(run.run_id, binding.uri, binding.name)
            self._tell(Bind(name, written, in_process=True))
        else:
            self._tell(Bind(name, msgspec.structs.replace(run, name=binding.name)))
        self._journal.bind(name, binding)
        self._on_joined(name, binding)
