"""Judging events by the rules: a subscriber that publishes an `Alert` when a threshold is crossed.

What it publishes is a pure function of the rules, the host's limit, the events, and what of the
process's memory is mapped files or garbage. The figures of the
process and its devices are judged in the trainer's process, those of the process tree and the machine
where they are read: in the helper process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.units import format_bytes
from memlog.alerts.growth_meter import GrowthMeter
from memlog.alerts.limits import host_limit
from memlog.alerts.rules import Rule
from memlog.alerts.trigger import Trigger
from memlog.events import Alert, Batch, Device, DeviceReading, Epoch, Evaluation, Event, Sample
from memlog.metrics import fragmentation

COOLDOWN_S = 300.0
"""Between two alerts of one rule about one thing."""
MAX_SERIES = 64
"""Devices that a rule is judged for, at most."""

Reading: TypeAlias = Batch | Epoch | Evaluation | Sample

_WORDS = {">": "over", ">=": "at least", "<": "under", "<=": "at most"}


def engine_for(
    rules: Sequence[Rule],
    publish: Callable[[Event], object],
    diagnostics: Diagnostics,
    pid: int,
    on_alert: Callable[[Alert], object] | None = None,
    files: Callable[[], int | None] = lambda: None,
    *,
    sampled: bool = False,
) -> AlertEngine | None:
    """The engine for those of the rules that this process judges; ``None`` where there are none.

    Args:
        rules: All rules.
        publish: Takes the alerts.
        diagnostics: Counts errors.
        pid: The trainer's process number: its control group is the limit that ``%`` means.
        on_alert: Called with each alert after it was published; its errors are counted.
        files: As for `AlertEngine`.
        sampled: Whether this is the helper process.
    """
    mine = [rule for rule in rules if rule.sampled == sampled]
    if not mine:
        return None
    shares = any(rule.share and rule.figure.startswith("host.") for rule in mine)
    limit = host_limit(pid) if shares else None
    return AlertEngine(mine, publish, diagnostics, limit=limit, on_alert=on_alert, files=files)


class AlertEngine:
    """Judges events, from any thread.

    Args:
        rules: What to judge by.
        publish: Takes the alerts, on the thread of the event that caused them.
        diagnostics: Counts the callback's errors, and is told of limits that are unknown.
        limit: Bytes that ``%`` of a host's figure is of.
        cooldown: Seconds between two alerts of one rule about one thing, by the events' own time.
        on_alert: Called with each alert after it was published.
        files: Says how many bytes of this process's resident set are pages of mapped files, where that is
            known: reading a file in is no growth.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        *,
        limit: int | None = None,
        cooldown: float = COOLDOWN_S,
        on_alert: Callable[[Alert], object] | None = None,
        files: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._publish = publish
        self._diagnostics = diagnostics
        self._on_alert = on_alert
        self._limits: dict[str, int | None] = {"host": limit}
        # A signal handler may publish while its own thread is in here.
        self._lock = threading.RLock()
        self._watches = watches = [
            _Watch(rule, self._limits, diagnostics, round(cooldown * 1e6), files) for rule in rules
        ]
        self._judges: dict[type, tuple[Callable[[Any, list[Alert]], None], ...]] = {
            kind: tuple(watch.judge for watch in watches if kind in watch.kinds)
            for kind in (Batch, Epoch, Evaluation, Sample)
        }

    def __call__(self, event: Event) -> None:
        """Judges one event."""
        judges = self._judges.get(type(event))
        if judges:
            alerts: list[Alert] = []
            with self._lock:
                for judge in judges:
                    judge(event, alerts)
            for alert in alerts:
                self._tell(alert)
        elif isinstance(event, Device) and len(self._limits) <= MAX_SERIES:
            self._limits[event.name] = event.capacity

    def never_judged(self) -> dict[str, str]:
        """Rules of which nothing can be said, since no value of theirs was ever compared; and why."""
        return {watch.text: why for watch in self._watches if (why := watch.why_not_judged())}

    def recall(self, alerts: Iterable[Alert]) -> None:
        """What had fired before a new helper process began to judge does not do so again at once."""
        for watch in self._watches:
            for alert in alerts:
                if alert.rule == watch.text:
                    watch.recall(alert)

    def _tell(self, alert: Alert) -> None:
        self._publish(alert)
        if self._on_alert is not None:
            with self._diagnostics.contained_callback("on_alert"):
                self._on_alert(alert)


class _Series:
    """One rule about one thing: the host, or a device."""

    __slots__ = ("limit", "meter", "trigger")

    def __init__(self, rule: Rule, limit: int | None, cooldown_us: int) -> None:
        self.limit = limit
        threshold = rule.amount * limit if rule.share and limit is not None else rule.amount
        self.trigger = Trigger(rule, threshold, cooldown_us)
        self.meter = None if rule.growth is None else GrowthMeter(rule, threshold, cooldown_us)


class _Watch:
    """One rule, judged for everything that it is about."""

    def __init__(
        self,
        rule: Rule,
        limits: dict[str, int | None],
        diagnostics: Diagnostics,
        cooldown_us: int,
        files: Callable[[], int | None],
    ) -> None:
        self._rule = rule
        self._files = files
        self._limits = limits
        self._diagnostics = diagnostics
        self._cooldown_us = cooldown_us
        self._series: dict[str, _Series] = {}
        self._attribute = _ATTRIBUTES.get(rule.attribute, rule.attribute)
        self.judge = self._judge_host if rule.figure.startswith("host.") else self._judge_devices
        self.kinds = _kinds(rule)
        self.text = rule.text
        self._asked = self._devices = self._known = self._judged = False

    def recall(self, alert: Alert) -> None:
        """Takes an alert about the host for its own."""
        self._judged = True
        series = self._begin("host")
        if series is not None:
            series.trigger.has_fired(alert.time_us)

    def why_not_judged(self) -> str | None:
        """Why no value was ever compared with the threshold; ``None`` where one was."""
        if self._judged:
            return None
        return self._why_no_value() or self._why_not_compared()

    def _why_no_value(self) -> str | None:
        rule = self._rule
        if not self._asked:
            return _NOTHING_CAME[self.kinds]
        if rule.figure.startswith("device.") and not self._devices:
            return f"there was no {rule.device or 'accelerator'}"
        return None if self._known else f"{rule.attribute} could not be read"

    def _why_not_compared(self) -> str:
        rule = self._rule
        if rule.share and not self._series:
            return "how much memory there is is unknown"
        meters = [series.meter for series in self._series.values() if series.meter is not None]
        if meters:
            return meters[0].why_not_judged()
        return f"no {rule.held_axis} came, and it is to hold for {rule.hold}"

    def _judge_host(self, event: Reading, alerts: list[Alert]) -> None:
        self._asked = True
        value = getattr(event, self._attribute)
        if value is not None:
            self._take("host", value - self._of_files(event), event, alerts)

    def _without_garbage(self, meter: GrowthMeter, growth: float) -> float | None:
        """A growth without the cycles that Python had not come to collect; ``None``: they were all of it."""
        if self._rule.figure != "host.rss":
            return growth
        from memlog.probes.garbage import collect_garbage  # noqa: PLC0415 - for an alarm

        found = collect_garbage()
        return growth if found is None else meter.without_garbage(found.freed, found.left)

    def _of_files(self, event: Reading) -> int:
        """What growth leaves out: the kernel drops the pages of mapped files if it needs room."""
        if self._rule.growth is None:
            return 0
        if isinstance(event, Sample):
            return event.tree_file or 0 if self._attribute == "tree_pss" else 0
        return self._files() or 0

    def _judge_devices(self, event: Batch | Epoch | Evaluation, alerts: list[Alert]) -> None:
        self._asked = True
        for reading in event.devices:
            if self._rule.device is None or self._rule.device == reading.name:
                self._devices = True
                value = self._value(reading)
                if value is not None:
                    self._take(reading.name, value, event, alerts)

    def _value(self, reading: DeviceReading) -> float | None:
        if self._attribute == "fragmentation":
            return fragmentation(reading)
        value: int | None = getattr(reading, self._attribute)
        return value

    def _take(self, subject: str, value: float, event: Reading, alerts: list[Alert]) -> None:
        self._known = True
        series = self._series.get(subject)
        if series is None:
            series = self._begin(subject)
            if series is None:
                return
        index = _index(event, self._rule)
        if series.meter is None:
            self._judged = self._judged or self._rule.hold == 1 or index is not None
            fires = series.trigger.fires(value, index, event.time_us)
        elif index is None:
            return
        else:
            growth = series.meter.take(value, index, event.time_us)
            self._judged = self._judged or series.meter.judged
            if growth is not None:
                growth = self._without_garbage(series.meter, growth)
            value, fires = growth or 0.0, growth is not None
        if fires:
            alerts.append(_alert(self._rule, subject, value, event, series.limit))

    def _begin(self, subject: str) -> _Series | None:
        limit = self._limits.get(subject)
        if self._rule.share and not limit:
            self._diagnostics.say_once(
                f"limit of {subject}",
                f"how much memory {subject} has is unknown, so {self._rule.text!r} can't be judged: "
                "write a size in place of %",
            )
            return None
        if len(self._series) >= MAX_SERIES:
            return None
        series = self._series[subject] = _Series(self._rule, limit, self._cooldown_us)
        return series


_NOTHING_CAME: dict[tuple[type[Reading], ...], str] = {
    (Batch, Epoch, Evaluation): "no step, epoch or evaluation came",
    (Batch,): "no step came",
    (Epoch,): "no epoch came",
    (Sample,): "nothing was sampled",
}
_ATTRIBUTES = {"tree": "tree_pss"}
"""Fields of events that have another name than in rules."""


def _kinds(rule: Rule) -> tuple[type[Reading], ...]:
    """The events that a rule is judged by."""
    if rule.sampled:
        return (Sample,)
    if rule.growth is None:
        return (Batch, Epoch, Evaluation)
    return (Epoch,) if rule.growth.axis == "epoch" else (Batch,)


def _index(event: Reading, rule: Rule) -> int | None:
    """Where an event lies on the axis by which its rule is judged."""
    if isinstance(event, Evaluation):
        return None
    if rule.growth is not None and rule.growth.axis == "epoch" and isinstance(event, Epoch):
        return event.epoch
    return event.step


def _alert(rule: Rule, subject: str, value: float, event: Reading, limit: int | None) -> Alert:
    name = f"{subject}.{rule.attribute}"
    said = f"{rule.said} of {format_bytes(limit)}" if rule.share else rule.said
    per = "" if rule.growth is None else f" per {rule.growth}"
    held = f" for {rule.hold} {rule.held_axis}s" if rule.hold > 1 else ""
    verb = "is" if rule.growth is None else "grows"
    step = None if isinstance(event, Evaluation) else event.step
    return Alert(
        time_us=event.time_us,
        step=step,
        level=rule.level,
        rule=rule.text,
        title=f"{name} {verb} {_shown(rule, value)}{per}, {_WORDS[rule.comparison]} {said}{held}",
        text="",
        value=float(value),
        evaluation=event.evaluation if isinstance(event, Evaluation) else None,
        epoch=event.epoch if isinstance(event, Epoch) and step is None else None,
    )


def _shown(rule: Rule, value: float) -> str:
    return f"{value:.2f}" if rule.figure == "device.fragmentation" else format_bytes(value)
