"""Parts of flame graph files for https://www.speedscope.app.

Speedscope checks little in a file. It fails if a weight is negative, if the number of samples is not the
number of weights, if events close frames in the wrong order, or if events go back in time. It shows wrong
figures without an error if ``endValue`` is not the sum of the weights, or if two frames have the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memlog._version import __version__
from memlog.trace.exporters.stacks import Stack

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

_MAX_SAMPLES = 100_000
"""Maximum number of samples in a profile. Speedscope needs at least five seconds to load 500,000 samples."""
_MAX_FRAMES = 10_000_000
"""Maximum number of frames in all samples of a profile together."""


class Frames:
    """Table of the frames in a file. The table holds each name once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the frame's position in the table, counted from 0. A new name is added to the table."""
        return self.names.setdefault(name, len(self.names))


def sampled(
    name: str,
    weighted: Iterable[tuple[Stack, int]],
    frames: Frames,
    max_samples: int = _MAX_SAMPLES,
) -> dict[str, Any] | None:
    """Build a profile from stacks (outermost frame first) and their bytes; ``None`` if there are no stacks.

    If there are more than ``max_samples`` samples or ten million frames, the remaining bytes become one
    additional sample. So the sum of all samples is right.
    """
    samples: list[list[int]] = []
    weights: list[int] = []
    previous: Stack | None = None
    rest = depth = 0
    for stack, weight in weighted:
        if stack == previous:
            weights[-1] += weight
        elif len(samples) >= max_samples or depth + len(stack) > _MAX_FRAMES:
            rest += weight
        else:
            previous = stack
            depth += len(stack)
            samples.append([frames.number(frame) for frame in stack])
            weights.append(weight)
    if rest:
        samples.append([frames.number("(more than this file holds)")])
        weights.append(rest)
    if not samples:
        return None
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def speedscope_file(
    name: str,
    frames: Frames,
    profiles: Sequence[dict[str, Any] | None],
    files: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the whole document from the profiles that are not ``None``.

    Speedscope shows the first profile when it opens the file. ``files`` maps names of frames to the names of
    files that Speedscope shows for the frames.
    """
    known = files or {}
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": f"memlog {__version__}",
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {"name": name, "file": known[name]} if name in known else {"name": name}
                for name in frames.names
            ]
        },
        "profiles": [profile for profile in profiles if profile is not None],
    }
