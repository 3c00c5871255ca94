"""Stacks of frames over time, from the stream of events, for flame graphs and Chrome traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memlog.trace.encoding import (
    ENTER,
    EXIT,
    FORWARD,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    StreamEvent,
)
from memlog.trace.result import common_length, with_parents

Stack = tuple[str, ...]


class ThreadStacks:
    """Stack of one thread's frames. The thread's events open and close the frames."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._outside: Stack = ()
        """Frames of the thread's work outside modules: a backward pass or an optimizer's step."""
        self._modules: list[tuple[int, int]] = []
        self._open: Stack = ()

    def after(self, event: StreamEvent) -> list[tuple[bool, str]]:
        """Process an ENTER, EXIT or PHASE_CHANGE, and return the frames that the event closes and opens.

        Returns:
            In order: ``(False, frame)`` for a frame that closes, ``(True, frame)`` for a frame that opens.
        """
        if event.kind == ENTER:
            self._modules.append((event.layer, event.phase))
        elif event.kind == EXIT:
            if event.layer in (layer for layer, _ in self._modules):
                while self._modules.pop()[0] != event.layer:
                    pass
        else:
            self._outside = ()
            if event.phase != FORWARD:
                known = event.layer != OUTSIDE
                path = with_parents(self._paths[event.layer], self._paths) if known else ()
                self._outside = (PHASES[event.phase], *path)
        return self._switch(tuple(self._stack()))

    def close(self) -> list[tuple[bool, str]]:
        """Close all open frames. Return ``(False, frame)`` for each, the innermost frame first."""
        return self._switch(())

    def _switch(self, stack: Stack) -> list[tuple[bool, str]]:
        common = common_length(self._open, stack)
        closed = [(False, frame) for frame in reversed(self._open[common:])]
        self._open = stack
        return closed + [(True, frame) for frame in stack[common:]]

    def _stack(self) -> Iterator[str]:
        yield from self._outside
        previous: int | None = None
        for layer, phase in self._modules:
            if phase != previous and not (phase == FORWARD and self._outside):
                yield PHASES[RECOMPUTE] if phase == RECOMPUTE else PHASES[FORWARD]
            previous = phase
            yield self._paths[layer]
