"""Phases of a training program, such as ``rollout`` or ``validation``, and the peak of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from memlog._internal import current_session
from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Event, Phase, main_readings, now_us
from memlog.monitors._publishing import MAX_LABEL, host
from memlog.probes.accelerator import AcceleratorProbe
from memlog.probes.process import PeakWindow
from memlog.session.arguments import shown_label


class PhaseReader:
    """Reader of memory for the phases of one thread at one depth of nesting.

    At most one of these phases is open at a time. Peak counters are read and never reset. A phase's peak is
    derived from the change of the counters between two readings (`memlog.probes.process`).
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._accelerators = AcceleratorProbe(diagnostics)
        self._window = PeakWindow()

    def read(self, phase: OpenPhase) -> Phase:
        """Read memory now, and return the phase's event.

        The reading ends one period of peak measurement and begins the next.
        """
        rss, mark, *_ = host().read()
        peak, source = self._window.advance(rss, mark)
        devices = self._accelerators.read()
        duration_us = (time.perf_counter_ns() - phase.begun_ns) // 1000
        event = Phase(now_us(), phase.label, phase.within, duration_us, rss, peak, source, devices)
        phase.saw(event)
        return msgspec.structs.replace(event, highest=phase.highest)


class OpenPhase:
    """Phase that has begun.

    ``within`` names the phases that enclose this phase, the outermost first. ``highest`` maps ``"host"`` and
    each device's name to the highest reading of memory in use so far, in bytes.
    """

    def __init__(self, label: str, within: tuple[str, ...]) -> None:
        self.label = label
        self.within = within
        self.highest: dict[str, int] = {}
        self.begun_ns = time.perf_counter_ns()

    def saw(self, event: Batch | Phase) -> None:
        """Update ``highest`` with the memory in use when the event was made."""
        for reading in main_readings(event):
            if reading.level is not None:
                self.highest[reading.owner] = max(reading.level, self.highest.get(reading.owner, 0))


class Phases:
    """Phases of a session that have not ended, by thread. No method raises.

    ``publish`` is called with each phase that has ended.
    """

    def __init__(self, publish: Callable[[Event], object], diagnostics: Diagnostics) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._open: dict[int, list[OpenPhase]] = {}
        self._readers: dict[tuple[int, int], PhaseReader] = {}

    def begin(self, label: object) -> OpenPhase | None:
        """Begin and return a phase within this thread's innermost open phase; ``None`` after an error."""
        phase: OpenPhase | None = None
        with self._diagnostics.contained("beginning a phase"):
            thread = threading.get_ident()
            stack = self._open.setdefault(thread, [])
            phase = OpenPhase(_text(label), tuple(outer.label for outer in stack))
            stack.append(phase)
            self._reader(thread, len(stack)).read(phase)
        return phase

    def end_innermost(self, label: object) -> None:
        """End this thread's newest open phase named ``label``, if any, and the phases nested in it."""
        stack, wanted = self._open.get(threading.get_ident(), []), _text(label)
        self.end(next((opened for opened in reversed(stack) if opened.label == wanted), None))

    def end(self, phase: object, error: str | None = None) -> None:
        """End a phase that `begin` returned, and the phases nested in it. Ignore a phase that has ended.

        ``error`` is the type of the exception that ended the phase; ``None``: no exception.
        """
        # A copy, because `_end_from` removes entries, and other threads can begin phases.
        for thread, stack in list(self._open.items()):
            if phase in stack:
                self._end_from(thread, stack.index(phase), error)

    def discard(self, phase: OpenPhase) -> None:
        """Forget this thread's innermost phase, which proved to be none. Other phases end as usual."""
        thread = threading.get_ident()
        stack = self._open.get(thread, [])
        if stack[-1:] != [phase]:
            self.end(phase)
            return
        stack.pop()
        if not stack:
            del self._open[thread]

    def open_labels(self) -> list[str]:
        """Return the names of this thread's open phases, the outermost first."""
        return [opened.label for opened in self._open.get(threading.get_ident(), ())]

    def end_all(self) -> None:
        for thread in list(self._open):
            self._end_from(thread, 0, None)

    def receive(self, event: Event) -> None:
        """Update ``highest`` of all open phases with a step's readings."""
        if self._open and isinstance(event, Batch):
            for stack in list(self._open.values()):
                for phase in stack:
                    phase.saw(event)

    def _end_from(self, thread: int, depth: int, error: str | None) -> None:
        stack = self._open[thread]
        while len(stack) > depth:
            # Before the phase is removed: the reader belongs to the depth at which the phase began.
            reader = self._reader(thread, len(stack))
            phase = stack.pop()
            with self._diagnostics.contained("ending a phase"):
                event = reader.read(phase)
                for outer in stack:
                    outer.saw(event)
                self._publish(msgspec.structs.replace(event, error=error))
        if not stack:
            del self._open[thread]

    def _reader(self, thread: int, depth: int) -> PhaseReader:
        reader = self._readers.get((thread, depth))
        if reader is None:
            reader = self._readers[thread, depth] = PhaseReader(self._diagnostics)
        return reader


def _text(label: object) -> str:
    return shown_label(str(label)[:MAX_LABEL])


class phase:  # noqa: N801 - a context manager, used like a function
    """Mark a phase of the program, such as ``rollout`` or ``validation``, and record its peak.

    ::

        with memlog.phase("rollout"):
            with memlog.phase("generate"):
                ...

    Phases can be nested. A phase also ends if its block raises. Peak counters are only read, never reset.
    If no session runs, nothing happens. Never raises.

    Args:
        name: The phase's name, the same in each iteration.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: list[tuple[current_session.Publisher, object] | None] = []

    def __enter__(self) -> phase:  # noqa: PYI034 - typing.Self came with Python 3.11
        session = current_session.publisher()
        begun = None if session is None else session.open_phase(self._name)
        self._entered.append(None if session is None or begun is None else (session, begun))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        entered = self._entered.pop() if self._entered else None
        if entered is not None:
            session, begun = entered
            # GeneratorExit: a caller closed the generator early, which is not an error.
            name = None if kind in {None, GeneratorExit} else kind.__name__
            session.close_phase(begun, name)
