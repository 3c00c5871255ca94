"""Strict check of speedscope's file format; speedscope itself checks little of it."""

from __future__ import annotations

import math
from typing import Any

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
UNITS = {"none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"}


def check(document: Any) -> None:
    """Fail if speedscope would break on the file or show it wrongly."""
    assert document["$schema"] == SCHEMA
    names = [frame["name"] for frame in document["shared"]["frames"]]
    assert all(isinstance(name, str) and name for name in names)
    assert len(set(names)) == len(names), "the same frame name twice"
    profiles = document["profiles"]
    assert profiles, "no profiles"
    assert 0 <= document["activeProfileIndex"] < len(profiles)
    for profile in profiles:
        assert profile["unit"] in UNITS
        assert profile["name"]
        {"sampled": _sampled, "evented": _evented}[profile["type"]](profile, len(names))


def stacks(document: Any, profile: int) -> list[tuple[tuple[str, ...], int]]:
    """Return the stacks of a profile's samples, each with its weight."""
    names = [frame["name"] for frame in document["shared"]["frames"]]
    found = document["profiles"][profile]
    return [
        (tuple(names[frame] for frame in sample), weight)
        for sample, weight in zip(found["samples"], found["weights"], strict=True)
    ]


def entries(document: Any) -> int:
    """Return the number of samples and events in all profiles."""
    return sum(
        len(profile["samples"] if profile["type"] == "sampled" else profile["events"])
        for profile in document["profiles"]
    )


def _sampled(profile: Any, frames: int) -> None:
    assert len(profile["samples"]) == len(profile["weights"]) > 0
    assert all(math.isfinite(weight) and weight >= 0 for weight in profile["weights"])
    for sample in profile["samples"]:
        assert sample
        assert all(0 <= frame < frames for frame in sample)
    assert profile["startValue"] == 0
    assert profile["endValue"] == sum(profile["weights"])


def _evented(profile: Any, frames: int) -> None:
    opened: list[int] = []
    at = profile["startValue"]
    for event in profile["events"]:
        assert event["at"] >= at, "backward in time"
        at = event["at"]
        assert 0 <= event["frame"] < frames
        if event["type"] == "O":
            opened.append(event["frame"])
        else:
            assert event["type"] == "C"
            assert opened, "closed and never opened"
            assert opened.pop() == event["frame"], "crossed"
    assert not opened, "opened and never closed"
    assert at <= profile["endValue"]
