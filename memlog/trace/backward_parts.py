"""Bytes that layers add in the backward pass, where no call of a module shows when a layer begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LayersAround = Callable[[int], Sequence[int]]
"""Function that returns the numbers of a layer and of all layers that contain it. It returns no number for
work outside all modules."""


class BackwardParts:
    """Parts of one thread's backward pass, and the bytes that each part adds.

    A part is the time in which the backward pass is in one layer, or in layers inside it, without
    interruption.

    Args:
        layers_around: Function that returns a layer and the layers that contain it.
        added: Function that is called when a part ends, with the layer and the bytes that the part added.
    """

    def __init__(self, layers_around: LayersAround, added: Callable[[int, int], object]) -> None:
        self._layers_around = layers_around
        self._added = added
        self._open: dict[int, int] = {}
        """Live bytes at the beginning of each open part, by layer."""
        self._peaks: dict[int, int] = {}

    def begin(self, layer: int, live: int) -> None:
        """Begin a layer's part at ``live`` bytes, and end the parts of all layers that do not contain it."""
        around = self._layers_around(layer)
        for interrupted in [known for known in self._open if known not in around]:
            self._end(interrupted)
        for containing in around:
            self._open.setdefault(containing, live)
            self._peaks.setdefault(containing, live)

    def reach(self, live: int) -> None:
        """Raise the peaks of the open parts to ``live`` bytes, if they are lower."""
        for layer, peak in self._peaks.items():
            if live > peak:
                self._peaks[layer] = live

    def end(self) -> None:
        """End all open parts."""
        for layer in list(self._open):
            self._end(layer)

    def _end(self, layer: int) -> None:
        self._added(layer, self._peaks.pop(layer) - self._open.pop(layer))
