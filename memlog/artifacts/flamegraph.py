"""Recognise speedscope files, check them, and show them in MiB with speedscope's static build.

Speedscope's page checks nothing. If a file has a fault that this module finds, the page would only show
"something went wrong". Speedscope's JSON schema finds few of these faults.

For the unit ``bytes``, speedscope writes "MB" for 1024² bytes, but places the ticks of its scale at decimal
numbers of bytes. For example, the label of the tick at 10,000,000 bytes is 9.54 MB. If numbers have no unit,
speedscope does not convert them. So memlog converts the numbers to MiB, removes the unit, and adds "in MiB"
to the profile's name. Only speedscope's page gets the converted numbers. The file on the disk stays the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from memlog._internal.npm_package import SPEEDSCOPE, FetchError, cache_directory
from memlog._internal.terminal import MIB
from memlog.errors import UnopenableFileError, ViewerUnavailableError
from memlog.trace.exporters.profiles import SCHEMA

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

SpeedscopeUnit: TypeAlias = Literal[
    "none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"
]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Head(msgspec.Struct):
    schema: str | None = msgspec.field(name="$schema", default=None)


class _Frame(msgspec.Struct):
    name: str
    file: str | None = None
    line: float | None = None
    col: float | None = None


class _Shared(msgspec.Struct):
    frames: list[_Frame]


class _Sampled(msgspec.Struct, tag="sampled", rename="camel"):
    name: str
    unit: SpeedscopeUnit
    start_value: float
    end_value: float
    samples: list[list[Index]]
    weights: list[Annotated[float, msgspec.Meta(ge=0)]]

    def problem(self, frames: int) -> str | None:
        if len(self.samples) != len(self.weights):
            return f"it has {len(self.samples):,} samples and {len(self.weights):,} weights"
        highest = max(itertools.chain.from_iterable(self.samples), default=-1)
        return _out_of_range(highest) if highest >= frames else None


class _Change(msgspec.Struct):
    type: Literal["O", "C"]
    at: float
    frame: Index


class _Evented(msgspec.Struct, tag="evented", rename="camel"):
    name: str
    unit: SpeedscopeUnit
    start_value: float
    end_value: float
    events: list[_Change]

    def problem(self, frames: int) -> str | None:
        open_frames: list[int] = []
        before = -math.inf
        for number, event in enumerate(self.events):
            if event.frame >= frames:
                return _out_of_range(event.frame)
            if event.at < before:
                return f"event {number:,} goes back in time"
            before = event.at
            if event.type == "O":
                open_frames.append(event.frame)
            elif not open_frames or open_frames.pop() != event.frame:
                return f"event {number:,} closes a frame that is not the innermost one"
        return f"{len(open_frames):,} frames are never closed" if open_frames else None


class _File(msgspec.Struct, rename="camel"):
    shared: _Shared
    profiles: list[_Sampled | _Evented]
    active_profile_index: int | None = None


def is_flamegraph(content: bytes) -> bool:
    """Return True if the content names speedscope's ``$schema``, even if other parts are damaged."""
    try:
        return msgspec.json.decode(content, type=_Head).schema == SCHEMA
    except _UNDECODABLE:
        return content.lstrip()[:1] == b"{" and SCHEMA.encode() in content


def check(content: bytes) -> None:
    """Check a file for all faults that break speedscope's page.

    Raises:
        UnopenableFileError: The page would fail to load the file, or would show nothing.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except _UNDECODABLE as error:
        raise UnopenableFileError(f"it is damaged: {error}") from error
    if not file.profiles:
        raise UnopenableFileError("it has no profile")
    active = file.active_profile_index
    if active is not None and not 0 <= active < len(file.profiles):
        raise UnopenableFileError(f"it selects profile {active}, which it lacks")
    for number, profile in enumerate(file.profiles, 1):
        # A name from the file may be long, and may contain control characters of a terminal.
        label = f"profile {number} ({profile.name[:60]!r})"
        if profile.start_value <= profile.end_value:
            problem = profile.problem(len(file.shared.frames))
        else:
            problem = f"it ends ({profile.end_value:g}) before it begins ({profile.start_value:g})"
        if problem is not None:
            raise UnopenableFileError(f"{label}: {problem}")


def _out_of_range(index: int) -> str:
    return f"it names frame {index:,}, which the file lacks"


_KIB = 1024


def in_binary_units(content: bytes, title: str) -> bytes:
    """Return a file with its profiles converted from bytes to MiB.

    A profile of less than 1 MiB is converted to KiB. A profile of less than 1 KiB is not converted. A file
    without a title gets ``title``. `memlog.artifacts.flamegraph.check` must have accepted ``content``.
    """
    try:
        document = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return content  # a field that speedscope ignores has a number that is too large
    document["name"] = document.get("name") or title
    document["profiles"] = [_scaled(profile) for profile in document["profiles"]]
    return msgspec.json.encode(document)


def _scaled(profile: dict[str, Any]) -> dict[str, Any]:
    span = profile["endValue"] - profile["startValue"]
    if profile["unit"] != "bytes" or span < _KIB:
        return profile
    divisor, unit = (MIB, "MiB") if span >= MIB else (_KIB, "KiB")
    # Division by a power of two is exact.
    scaled = {
        **profile,
        "name": f"{profile['name']} (in {unit})",
        "unit": "none",
        "startValue": profile["startValue"] / divisor,
        "endValue": profile["endValue"] / divisor,
    }
    if profile["type"] == "sampled":
        scaled["weights"] = [weight / divisor for weight in profile["weights"]]
    else:
        scaled["events"] = [{**event, "at": event["at"] / divisor} for event in profile["events"]]
    return scaled


def find_viewer(announce: Callable[[str], object]) -> Path:
    """Return the folder of speedscope's static build.

    If neither this install nor the user's cache contains the build, npm fetches it. Before that, ``announce``
    is called with one line of text.

    Raises:
        ViewerUnavailableError: The build was not found and can't be fetched. The message says why, and what
            to do.
    """
    try:
        found = SPEEDSCOPE.find(announce)
    except FetchError as error:
        raise ViewerUnavailableError(f"({error}): {error.remedy}") from error
    except OSError as error:
        why = f"({cache_directory()}: {error.strerror or error})"
        raise ViewerUnavailableError(
            f"{why}: set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    assert found is not None  # noqa: S101 - it is fetched if it is missing
    return found
