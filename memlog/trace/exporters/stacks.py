"""The stream of events as stacks of frames over time, for flame graphs and traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memlog.trace.encoding import (
    ENTER,
    EXIT,
    FORWARD,
    OUTSIDE,
    PHASE_CHANGE,
    PHASES,
    RECOMPUTE,
    StreamEvent,
)
from memlog.trace.result import with_parents

Stack = tuple[str, ...]


def path_stack(path: str, paths: Sequence[str]) -> Stack:
    """A layer below the layers that it lies in.

    Args:
        path: Of the layer.
        paths: All layers by number; the second is the model.
    """
    return tuple(with_parents(path, paths[1] if len(paths) > 1 else ""))


class ThreadStacks:
    """What one thread is at, after each of its events.

    Args:
        paths: Layers by number.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._turn: Stack = ()
        self._modules: list[tuple[int, int]] = []

    def after(self, event: StreamEvent) -> Stack | None:
        """The stack once ``event`` has happened; ``None`` for events that change none."""
        if event.kind == ENTER:
            self._modules.append((event.layer, event.phase))
        elif event.kind == EXIT:
            if event.layer in (layer for layer, _ in self._modules):
                while self._modules.pop()[0] != event.layer:
                    pass
        elif event.kind == PHASE_CHANGE:
            self._turn = ()
            if event.phase != FORWARD:
                outside = event.layer == OUTSIDE
                path = () if outside else path_stack(self._paths[event.layer], self._paths)
                self._turn = (PHASES[event.phase], *path)
        else:
            return None
        return tuple(self._stack())

    def _stack(self) -> Iterator[str]:
        yield from self._turn
        said: int | None = None
        for layer, phase in self._modules:
            if phase != said and not (phase == FORWARD and self._turn):
                yield PHASES[RECOMPUTE] if phase == RECOMPUTE else PHASES[FORWARD]
            said = phase
            yield self._paths[layer]
