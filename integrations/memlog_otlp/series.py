"""Series of OpenTelemetry and Prometheus: names by the semantic conventions, and attributes.

If OpenTelemetry has a convention for a figure, the figure has its name. Other names begin with ``memlog.``,
because the conventions reserve their prefixes. Sizes are in bytes. Labels, layers and devices are attributes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from memlog.events import Alert, Status
from memlog.sink import Point, Target, valid_text
from memlog_otlp.backend import RANK as RANK_VARIABLE

MIB = 1024**2
STEP = {"step": "memlog.step", "evaluation": "memlog.evaluation", "epoch": "memlog.epoch"}
"""Series with the index of the newest point on each axis."""
RUN, RANK, STATUS = "memlog.run", "memlog.rank", "memlog.status"

_CONVENTIONS = {
    "memory/host/rss": "process.memory.usage",
    "memory/host/available": "system.memory.linux.available",
    "memory/host/cgroup": "container.memory.usage",
    "memory/gpu/device_used": "hw.gpu.memory.usage",
}
_RATIOS = ("fragmentation", "imbalance")
_KNOWN = re.compile(r"(?:memory|memlog)(?:/[A-Za-z0-9_.\-]+)+")
_LABELLED = re.compile(r"memory/(?P<kind>scope|phase|point)/(?P<label>[^/]+)/(?P<rest>.+)")
_LAYER = re.compile(r"memory/layers/(?P<layer>.+)\.(?P<figure>\w+)")
_DEVICE = re.compile(r"(?P<before>memory/(?:\w+/)?)(?P<device>[a-z]+\d+|mps)/(?P<figure>\w+)")
_LONGEST = 200
"""Maximum number of characters of an attribute's text."""


class Series(NamedTuple):
    """One series, and one value in it."""

    name: str
    unit: str
    """Unit by the conventions: ``By``, ``1`` for a fraction, or empty."""
    value: float
    attributes: Mapping[str, str]

    @property
    def is_level(self) -> bool:
        """True if the conventions call the figure an up-down counter."""
        return self.name in _CONVENTIONS.values()


def series_of(point: Point) -> Series:
    """Return the series of a point."""
    base = point.name.removesuffix("_mib")
    is_size = base != point.name
    unit = "By" if is_size else "1" if base.endswith(_RATIOS) else ""
    value = point.value * MIB if is_size else point.value
    base, attributes = _without_labels(base)
    if base in _CONVENTIONS:
        name = _CONVENTIONS[base]
    elif _KNOWN.fullmatch(base):
        *owner, figure = base.removeprefix("memory/").removeprefix("memlog/").split("/")
        name = ".".join(["memlog", *owner, *(["memory"] if is_size else ()), figure])
    else:
        name, attributes = "memlog.other", {"memlog.name": text_of(point.name)}
    return Series(name, unit, value, attributes)


def _without_labels(base: str) -> tuple[str, dict[str, str]]:
    """Return a metric's name without a label, a layer and a device, and these as attributes."""
    attributes = {}
    if found := _LABELLED.fullmatch(base):
        attributes["memlog.label"] = found["label"]
        base = f"memory/{found['kind']}/{found['rest']}"
    if found := _LAYER.fullmatch(base):
        attributes["memlog.layer"] = found["layer"]
        base = f"memory/layer/{found['figure']}"
    if found := _DEVICE.fullmatch(base):
        attributes["hw.id"] = found["device"]
        base = f"{found['before']}gpu/{found['figure']}"
    return base, attributes


def index_of(point: Point) -> Series:
    """Return the series with the index of a point on its axis."""
    return Series(STEP[point.axis], "", float(point.index), {})


def info_of(parameters: Mapping[str, str]) -> Series:
    """Return a series that has a run's parameters as attributes. Its value is 1."""
    named = {f"memlog.{text_of(name)}": text_of(value) for name, value in parameters.items()}
    return Series("memlog.run.info", "", 1.0, named)


def alert_of(alert: Alert) -> Series:
    """Return a series that has an alert's texts as attributes. Its value is 1."""
    texts = {"rule": alert.rule, "level": alert.level, "title": alert.title, "where": alert.where}
    named = {f"memlog.alert.{name}": text_of(text) for name, text in texts.items() if text}
    return Series("memlog.alert", "", 1.0, named)


def end_of(status: Status) -> Series:
    """Return the series with a run's end. Its value is 1."""
    return Series("memlog.run.end", "", 1.0, {STATUS: status})


def run_of(target: Target) -> str:
    """Return the id of the run, which is an attribute of each series."""
    known = target.joined or target.opened
    return known.run_id if known else target.id_with_beside


def common_of(target: Target) -> dict[str, str]:
    """Return the attributes that all series of a run have: its id, and the rank of the training process."""
    return {RUN: run_of(target), RANK: os.environ.get(RANK_VARIABLE, "0")}


def text_of(text: str) -> str:
    return valid_text(text)[:_LONGEST]
