"""Bytes that each layer adds in the backward pass.

The backward pass does not call modules. So a layer's part of the pass begins and ends when the operations
change from one layer to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LayersAround = Callable[[int], Sequence[int]]
"""Function that returns a layer's number and the numbers of all layers that contain the layer. For work
outside all modules, it returns no number."""


class BackwardParts:
    """Parts of one thread's backward pass, and the bytes that each part adds.

    A part is an uninterrupted time in which the backward pass runs operations of one layer, or of layers
    inside this layer. When a part ends, ``added`` is called with the layer and the added bytes.
    """

    def __init__(self, layers_around: LayersAround, added: Callable[[int, int], object]) -> None:
        self._layers_around = layers_around
        self._added = added
        self._open: dict[int, int] = {}
        """Live bytes at the beginning of each part that has not ended, by layer."""
        self._peaks: dict[int, int] = {}

    def begin(self, layer: int, live: int) -> None:
        """Begin the parts of a layer and of all layers that contain it. End the parts of all other layers.

        A part that has already begun continues. ``live`` is the current number of live bytes.
        """
        around = self._layers_around(layer)
        for interrupted in [known for known in self._open if known not in around]:
            self._end(interrupted)
        for containing in around:
            self._open.setdefault(containing, live)
            self._peaks.setdefault(containing, live)

    def reach(self, live: int) -> None:
        """Set the peak of each open part to ``live`` bytes if the peak is lower."""
        for layer, peak in self._peaks.items():
            if live > peak:
                self._peaks[layer] = live

    def end(self) -> None:
        for layer in list(self._open):
            self._end(layer)

    def _end(self, layer: int) -> None:
        self._added(layer, self._peaks.pop(layer) - self._open.pop(layer))
