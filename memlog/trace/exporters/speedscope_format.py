"""What every flame graph for https://www.speedscope.app is made of.

The page checks little: a negative weight, samples and weights of different length, crossed or backward events
break it; ``endValue`` other than the sum of the weights and one name for two frames are silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memlog._version import __version__
from memlog.trace.exporters.stacks import Stack

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

_SAMPLES_AT_MOST = 100_000
"""Of one profile: half a million in a file take the page five seconds and more to load."""


_FRAMES_AT_MOST = 10_000_000
"""Of all samples of one profile together."""


class Frames:
    """Numbers for names, each name once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The name's, from 0."""
        return self.names.setdefault(name, len(self.names))


def sampled(
    name: str,
    weighted: Iterable[tuple[Stack, int]],
    frames: Frames,
    at_most: int = _SAMPLES_AT_MOST,
) -> dict[str, Any] | None:
    """A profile of bytes by stack, outermost frame first; ``None`` where there are none.

    What is past ``at_most`` samples, or ten million frames, stands in one more, so that the sum is right.
    """
    samples: list[list[int]] = []
    weights: list[int] = []
    previous: Stack | None = None
    rest = depth = 0
    for stack, weight in weighted:
        if stack == previous:
            weights[-1] += weight
        elif len(samples) >= at_most or depth + len(stack) > _FRAMES_AT_MOST:
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
    name: str, frames: Frames, profiles: Sequence[dict[str, Any] | None]
) -> dict[str, Any]:
    """The whole document, of those profiles that there are."""
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": f"memlog {__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames.names]},
        "profiles": [profile for profile in profiles if profile is not None],
    }
