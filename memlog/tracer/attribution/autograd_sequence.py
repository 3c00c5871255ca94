"""Map from autograd's operation numbers to layers, to attribute the backward pass."""

from __future__ import annotations

from array import array
from bisect import bisect_right

MAX_SPANS = 100_000
"""Maximum number of spans to remember (1.2 MB). Beyond it, the oldest half is dropped."""


class SequenceMap:
    """Map from operation numbers of one thread to the layers that made the operations.

    Serves one thread: each thread has its own numbers. Numbers only rise, so the spans are sorted.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._layers = array("i")

    def mark(self, number: int, layer: int) -> None:
        """Record that ``layer`` makes the operations from ``number`` on."""
        if self._starts and self._starts[-1] == number:
            self._layers[-1] = layer  # the layer before made no operation
            return
        if len(self._starts) >= MAX_SPANS:
            del self._starts[: MAX_SPANS // 2]
            del self._layers[: MAX_SPANS // 2]
        self._starts.append(number)
        self._layers.append(layer)

    def since(self, number: int, layer: int) -> None:
        """Record that ``layer`` made the operations from ``number`` on, except those marked since."""
        if self._layers and self._layers[-1] != layer:
            self.mark(max(number, self._starts[-1]), layer)

    def layer_of(self, number: int) -> int | None:
        """Return the layer that made operation ``number``; ``None`` if it was made before the first mark."""
        index = bisect_right(self._starts, number) - 1
        return self._layers[index] if index >= 0 else None
