"""Colours of frames in speedscope.

Speedscope sorts a profile's frames by file and name, and a frame's place in that order sets its colour. The
names of categories stand together in the alphabet, so they would all have nearly the same colour. Here each
frame gets a "file" that sets its place: the categories lie at equal distances, and the layers between them in
the model's order. The file's name is a number of invisible characters (the place), then the layer's class.
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
