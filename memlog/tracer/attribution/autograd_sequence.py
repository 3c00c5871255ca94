"""Whose backward pass is it? Autograd numbers its operations, and each layer's forward made some of them."""

from __future__ import annotations

from array import array
from bisect import bisect_right

MAX_SPANS = 100_000
"""Spans that are remembered (1.2 MB); the oldest half goes where there are more."""


class SequenceMap:
    """Tells which layer was at work when an operation of the graph was made.

    One of these serves one thread: each has numbers of its own. Numbers only rise, so the spans are sorted.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._layers = array("i")

    def mark(self, number: int, layer: int) -> None:
        """From operation ``number`` on it is ``layer`` that makes them."""
        if self._starts and self._starts[-1] == number:
            self._layers[-1] = layer  # the one before made none
            return
        if len(self._starts) >= MAX_SPANS:
            del self._starts[: MAX_SPANS // 2]
            del self._layers[: MAX_SPANS // 2]
        self._starts.append(number)
        self._layers.append(layer)

    def since(self, number: int, layer: int) -> None:
        """From operation ``number`` on it was ``layer`` that made them, but for what was marked since."""
        if self._layers and self._layers[-1] != layer:
            self.mark(max(number, self._starts[-1]), layer)

    def layer_of(self, number: int) -> int | None:
        """The layer that made operation ``number``; ``None`` for one from before the first mark."""
        index = bisect_right(self._starts, number) - 1
        return self._layers[index] if index >= 0 else None
