"""Layer, phase and line that an operation on the CPU counts for."""

from __future__ import annotations

from memlog.trace.encoding import BACKWARD, FORWARD, OUTSIDE
from memlog.tracer.attribution.calling_lines import CallingLines
from memlog.tracer.attribution.module_stack import ModuleStack, ThreadState
from memlog.tracer.engines.cpu.storage_events import StorageEvents


class CurrentOwner:
    """Finder of the layer and phase that an operation counts for. It also sets the line of new storages.

    Args:
        stack: Stack of the running modules.
        lines: Lines of the program.
        events: Writer of storages' events. Its ``line`` is set to the current line, or to 0 within a module.
    """

    def __init__(self, stack: ModuleStack, lines: CallingLines, events: StorageEvents) -> None:
        self._stack = stack
        self._lines = lines
        self._events = events

    def __call__(self, thread_state: ThreadState) -> tuple[int, int]:
        """Return layer and phase of the current operation; set the line if it runs in no module."""
        layer, phase = self._stack.owner(thread_state)
        line = 0
        if layer == OUTSIDE:
            line = thread_state.line if phase == BACKWARD else 0
            line = line or self._lines.current_line()
            if phase == FORWARD:
                self._stack.mark_line(line, thread_state)
        self._events.line = line
        return layer, phase
