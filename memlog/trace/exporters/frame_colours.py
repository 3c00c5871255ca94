"""Colours of frames in speedscope.

Speedscope sorts a profile's frames by file and name. A frame's place in this order sets its colour. The names
of all categories begin with "[". So the categories would be neighbours and have nearly the same colour. To
prevent this, each frame gets a "file" that sets the frame's place. The categories get places at equal
distances. The layers get the places between the categories, in the model's order. The file's name begins with
invisible characters, whose number sets the place. The layer's class follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_MARK = "\N{WORD JOINER}"


def files_by_frame(
    categories: Sequence[str], layers: Iterable[str], kinds: Mapping[str, str]
) -> dict[str, str]:
    """Return the "file" of each frame, by the frame's name.

    Args:
        categories: Names of the frames of categories.
        layers: Names of all other frames, in the model's order.
        kinds: Class names of layers, by the names of their frames.
    """
    between = list(layers)
    count = max(len(categories), 1)
    files = {frame: f"{_MARK * (2 * place + 1)}category" for place, frame in enumerate(categories)}
    for number, frame in enumerate(between):
        place = number * count // len(between)
        files[frame] = f"{_MARK * (2 * place + 2)}{kinds.get(frame) or 'not a layer'}"
    return files
