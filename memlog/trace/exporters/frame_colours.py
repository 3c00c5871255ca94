"""Colours of frames in speedscope.

Speedscope gives a frame the colour of its place among the profile's frames, in the order of file and name. So
categories, whose names stand together in the alphabet, would all have nearly the same colour. Here each frame
gets a "file" that sets its place: the categories lie at equal distances, and the layers between them in the
model's order. The places are marks of no width; the text behind them is the layer's class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_MARK = "\N{WORD JOINER}"


def files_by_frame(
    categories: Sequence[str], layers: Iterable[str], kinds: Mapping[str, str]
) -> dict[str, str]:
    """Return the "file" of each frame, by its name.

    Args:
        categories: Frames of categories.
        layers: All other frames, in the model's order.
        kinds: Classes of layers, by their frames.
    """
    between = list(layers)
    count = max(len(categories), 1)
    files = {frame: f"{_MARK * (2 * place + 1)}category" for place, frame in enumerate(categories)}
    for number, frame in enumerate(between):
        place = number * count // len(between)
        files[frame] = f"{_MARK * (2 * place + 2)}{kinds.get(frame) or 'not a layer'}"
    return files
