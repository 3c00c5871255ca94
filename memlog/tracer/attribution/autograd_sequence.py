"""Map from autograd's operation numbers to layers, to attribute the backward pass."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from memlog.trace.encoding import OUTSIDE
from memlog.tracer import torch_private

MAX_SPANS = 100_000
"""Maximum number of spans to remember (1.2 MB). A span is a range of operations that one layer made. Beyond
the maximum, the oldest half is dropped."""


class SequenceMap:
    """Map from operation numbers of one thread to the layers (or lines) that made the operations.

    Each thread has its own numbers. They only rise, so the spans are sorted.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._layers = array("i")

    def mark(self, number: int, layer: int) -> None:
        """Record that ``layer`` makes the operations from ``number`` on."""
        if self._starts and self._starts[-1] == number:
            self._layers[-1] = layer  # the previous layer made no operation
            return
        if len(self._starts) >= MAX_SPANS:
            del self._starts[: MAX_SPANS // 2]
            del self._layers[: MAX_SPANS // 2]
        self._starts.append(number)
        self._layers.append(layer)

    def since(self, number: int, layer: int) -> None:
        """Assign operation ``number`` and all later operations to ``layer``.

        Operations before the newest span keep their layers. Before the first `mark`, nothing is assigned.
        """
        if self._layers and self._layers[-1] != layer:
            self.mark(max(number, self._starts[-1]), layer)

    def layer_of(self, number: int) -> int | None:
        """Return the layer that made operation ``number``; ``None`` if it was made before the first mark."""
        index = bisect_right(self._starts, number) - 1
        return self._layers[index] if index >= 0 else None


class GraphOwners:
    """Owners of the operations in one thread's graph. An owner is a layer and a line of the program."""

    def __init__(self) -> None:
        self._layers = SequenceMap()
        self._lines = SequenceMap()
        self._last_marked = 0
        self._backward_mark: int | None = None
        """Next operation number at the last call of `made_by_backward`; ``None`` after `backward_ends`."""

    def mark(self, layer: int) -> None:
        """Record that ``layer`` makes the next operations."""
        number = torch_private.next_sequence_number()
        if number is not None:
            self._last_marked = number
            self._layers.mark(number, layer)
            self._lines.mark(number, 0)

    def mark_line(self, line: int) -> None:
        """Assign the operations since the last `mark` or `mark_line` to a line of the program."""
        number = torch_private.next_sequence_number()
        if number is not None and number > self._last_marked:
            self._lines.mark(self._last_marked, line)
            self._last_marked = number

    def made_by_backward(self, layer: int) -> None:
        """Assign the newest operations of a backward pass (``create_graph=True``) to ``layer``.

        Autograd numbers an operation before the tracer sees it. So ``layer``, which is differentiated, gets
        all operations that were numbered since the last call. At the first call in a pass, it gets only the
        last numbered operation.
        """
        number = torch_private.next_sequence_number()
        if number is not None:
            seen = number - 1 if self._backward_mark is None else self._backward_mark
            self._layers.since(seen, layer)
            self._backward_mark = number

    def backward_ends(self, layer: int) -> None:
        """Record that a backward pass has ended. If it made a graph, ``layer`` makes the next operations."""
        if self._backward_mark is not None:
            self._layers.since(self._backward_mark, layer)
            self._backward_mark = None

    def owner_of(self, number: int) -> tuple[int, int]:
        """Return the layer and the line that made operation ``number``; 0 for each that is unknown."""
        return self._layers.layer_of(number) or OUTSIDE, self._lines.layer_of(number) or 0
