"""Map from autograd's sequence numbers to layers. The map gives the layer of each backward operation."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from memlog.trace.encoding import OUTSIDE
from memlog.tracer import torch_private

MAX_RANGES = 100_000
"""Maximum number of ranges to remember (1.2 MB); `SequenceMap` explains them. At the maximum, the oldest
half is dropped."""


class SequenceMap:
    """Map from the sequence numbers of one thread's operations to the layers (or lines) that made them.

    Autograd numbers the operations of each thread separately. A range is an unbroken sequence of operations
    by one layer. The numbers only rise, so the ranges are sorted.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._layers = array("i")

    def mark(self, number: int, layer: int) -> None:
        """Record that ``layer`` makes the operations from ``number`` on."""
        if self._starts and self._starts[-1] == number:
            self._layers[-1] = layer  # the previous layer made no operation
            return
        if len(self._starts) >= MAX_RANGES:
            del self._starts[: MAX_RANGES // 2]
            del self._layers[: MAX_RANGES // 2]
        self._starts.append(number)
        self._layers.append(layer)

    def since(self, number: int, layer: int) -> None:
        """Assign operation ``number`` and all later operations to ``layer``.

        Operations before the last `mark` keep their layers. If `mark` was never called, do nothing.
        """
        if self._layers and self._layers[-1] != layer:
            self.mark(max(number, self._starts[-1]), layer)

    def layer_of(self, number: int) -> int | None:
        """Return the layer that made operation ``number``; ``None`` if unknown."""
        index = bisect_right(self._starts, number) - 1
        return self._layers[index] if index >= 0 else None


class GraphOwners:
    """Layer and line of the program for each operation in one thread's autograd graph."""

    def __init__(self) -> None:
        self._layers = SequenceMap()
        self._lines = SequenceMap()
        self._last_marked = 0
        self._backward_mark: int | None = None
        """Number of the first operation that `made_by_backward` has not assigned yet; ``None`` before the
        first call of `made_by_backward` in a backward pass."""

    def mark(self, layer: int) -> None:
        """Record that ``layer`` makes the next operations."""
        number = torch_private.next_sequence_number()
        if number is not None:
            self._last_marked = number
            self._layers.mark(number, layer)
            self._lines.mark(number, 0)

    def mark_line(self, line: int) -> None:
        """Record that ``line`` of the program made the operations since the last `mark` or `mark_line`."""
        number = torch_private.next_sequence_number()
        if number is not None and number > self._last_marked:
            self._lines.mark(self._last_marked, line)
            self._last_marked = number

    def made_by_backward(self, layer: int) -> None:
        """Assign the newest operations of a backward pass (``create_graph=True``) to ``layer``.

        ``layer`` is the layer that the pass differentiates. At the first call in a pass, ``layer`` gets only
        the newest operation. At later calls, ``layer`` gets all operations since the previous call.
        """
        number = torch_private.next_sequence_number()
        if number is not None:
            seen = number - 1 if self._backward_mark is None else self._backward_mark
            self._layers.since(seen, layer)
            self._backward_mark = number

    def backward_ends(self, layer: int) -> None:
        """Record the end of a backward pass.

        If the pass made a graph, assign the next operations to ``layer``.
        """
        if self._backward_mark is not None:
            self._layers.since(self._backward_mark, layer)
            self._backward_mark = None

    def owner_of(self, number: int) -> tuple[int, int]:
        """Return the layer and the line that made operation ``number``. An unknown layer or line is 0."""
        return self._layers.layer_of(number) or OUTSIDE, self._lines.layer_of(number) or 0
