"""Evaluation of alert rules: a subscriber that publishes an `Alert` when a threshold is crossed.

The alerts depend only on the rules, the host's limit and the events. The helper process judges the rules as
the events come. The training process does only a part: before an alert about growth of ``host.rss``, it
collects garbage, and publishes the result (`HeapReading.freed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts.rules import Rule, alert_title
from memlog.alerts.trigger import GrowthMeter, Trigger
from memlog.events import (
    ALLOCATED,
    HOST_ANON,
    HOST_RSS,
    RESERVED,
    SHARED,
    TREE,
    Alert,
    Batch,
    Device,
    DeviceReading,
    Epoch,
    Evaluation,
    Event,
    HeapReading,
    Reading,
    Sample,
    readings,
)
from memlog.metrics import fragmentation
from memlog.probes.machine import machine_memory, memory_limit, read_cgroup
from memlog.probes.process import Collection, collect_garbage

COOLDOWN_S = 300.0
"""Minimum seconds between two alerts of one rule about the same device or host, by the events' timestamps."""

JudgedEvent: TypeAlias = Batch | Epoch | Evaluation | Sample
_Judge: TypeAlias = Callable[[Any, Sequence[Reading], list[Alert]], None]


def engine_for(
    rules: Sequence[Rule],
    publish: Callable[[Event], object],
    diagnostics: Diagnostics,
    pid: int,
    ask_for_garbage: Callable[[], object] | None = None,
) -> AlertEngine | None:
    """Return an engine for rules; ``None`` if there are no rules.

    ``pid`` is the training process's id: ``%`` in a rule about the host refers to `host_limit` of the
    training process. For the other arguments, see `AlertEngine`.
    """
    if not rules:
        return None
    shares = any(rule.share and rule.figure.startswith("host.") for rule in rules)
    limit = host_limit(pid) if shares else None
    return AlertEngine(rules, publish, diagnostics, limit=limit, ask_for_garbage=ask_for_garbage)


def host_limit(pid: int) -> int | None:
    """Return the limit of a process's memory, in bytes; ``None`` if unknown.

    The limit is the machine's memory or the smallest limit of the process's control groups, whichever is
    smaller. Other processes share this limit.
    """
    return memory_limit(read_cgroup(pid).limit, machine_memory())


class AlertEngine:
    """Subscriber that judges events by rules. It may be called from any thread.

    For each alert, ``publish`` is called, on the thread of the event that caused the alert. ``limit``: bytes
    that are 100 % in rules about the host; ``None`` if unknown. Growth of mapped files does not count for
    ``grows`` rules. ``ask_for_garbage`` asks the training process to collect garbage, and to publish the
    result as a `HeapReading` event; ``None``: this is the training process, which collects garbage at once.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        *,
        limit: int | None = None,
        cooldown: float = COOLDOWN_S,
        ask_for_garbage: Callable[[], object] | None = None,
    ) -> None:
        self._publish = publish
        self._limits: dict[str, int | None] = {"host": limit}
        self._newest: list[Reading] = []
        """Readings of the newest step."""
        # A signal handler may publish while its own thread holds the lock.
        self._lock = threading.RLock()
        self._watches = watches = [
            _Watch(
                rule,
                self._limits,
                diagnostics,
                round(cooldown * 1e6),
                ask_for_garbage,
                lambda: _bytes_of_files(self._newest),
            )
            for rule in rules
        ]
        self._judges: dict[type, tuple[_Judge, ...]] = {
            kind: tuple(watch.judge for watch in watches if kind in watch.kinds)
            for kind in (Batch, Epoch, Evaluation, Sample)
        }

    def __call__(self, event: Event, found: list[Reading] | None = None) -> None:
        """Judge an event. ``found``: its readings, if known."""
        judges = self._judges.get(type(event))
        if judges is not None:
            found = list(readings(event)) if found is None else found
            if isinstance(event, Batch):
                self._newest = found
            alerts: list[Alert] = []
            with self._lock:
                for judge in judges:
                    judge(event, found, alerts)
            for alert in alerts:
                self._publish(alert)
        elif isinstance(event, Device):
            self._limits[event.name] = event.capacity
        elif isinstance(event, HeapReading) and event.freed is not None:
            self._settle(Collection(event.freed, event.in_use))

    def finish(self) -> None:
        """Publish the alerts that still wait for a collection of garbage."""
        self._settle(None)

    def never_judged(self, *, sampled: bool | None = None) -> dict[str, str]:
        """Return the rules whose threshold was never compared with a value, each with the reason.

        With ``sampled``, return only rules that have this value of `Rule.sampled`.
        """
        watches = [watch for watch in self._watches if sampled in (None, watch.is_sampled)]
        return {watch.text: why for watch in watches if (why := watch.why_not_judged())}

    def _settle(self, found: Collection | None) -> None:
        alerts: list[Alert] = []
        with self._lock:
            for watch in self._watches:
                watch.settle(found, alerts)
        for alert in alerts:
            self._publish(alert)


class _Series:
    """State of one rule for the host or for one device."""

    def __init__(self, rule: Rule, limit: int | None, cooldown_us: int) -> None:
        self.limit = limit
        threshold = rule.amount * limit if rule.share and limit is not None else rule.amount
        self.trigger = Trigger(rule, threshold, cooldown_us)
        self.meter = None if rule.growth is None else GrowthMeter(rule, threshold, cooldown_us)


class _Watch:
    """One rule and its state for every device, or for the host."""

    def __init__(
        self,
        rule: Rule,
        limits: dict[str, int | None],
        diagnostics: Diagnostics,
        cooldown_us: int,
        ask_for_garbage: Callable[[], object] | None,
        files: Callable[[], int],
    ) -> None:
        self._rule = rule
        self._files = files
        self.is_sampled = rule.sampled
        self._ask_for_garbage = ask_for_garbage
        self._waiting: list[tuple[_Series, JudgedEvent, float]] = []
        """Growth for which a collection of garbage was asked: the series, the event and the growth."""
        self._limits = limits
        self._diagnostics = diagnostics
        self._cooldown_us = cooldown_us
        self._series: dict[str, _Series] = {}
        self._attribute = rule.attribute
        self._kind = RESERVED if rule.attribute == "reserved" else ALLOCATED
        self.judge = self._judge_host if rule.figure.startswith("host.") else self._judge_devices
        self.kinds = _kinds(rule)
        self.text = rule.text
        self._event_seen = self._device_seen = self._value_read = self._judged = False

    def settle(self, found: Collection | None, alerts: list[Alert]) -> None:
        """Decide on growth that waits for a collection of garbage. ``None``: garbage was not collected."""
        waiting, self._waiting = self._waiting, []
        for series, event, measured in waiting:
            growth: float | None = measured
            if found is not None and series.meter is not None:
                growth = series.meter.without_garbage(found.freed, found.left)
            if growth is not None:
                alerts.append(_alert(self._rule, "host", growth, event, series.limit))

    def why_not_judged(self) -> str | None:
        """Return why no value was ever compared with the threshold; ``None`` if a value was compared."""
        if self._judged:
            return None
        return self._why_no_value() or self._why_not_compared()

    def _why_no_value(self) -> str | None:
        rule = self._rule
        if not self._event_seen:
            return _NOTHING_CAME[self.kinds]
        if rule.figure.startswith("device.") and not self._device_seen:
            return f"there was no {rule.device or 'accelerator'}"
        return None if self._value_read else f"{rule.attribute} could not be read"

    def _why_not_compared(self) -> str:
        rule = self._rule
        if rule.share and not self._series:
            return "the memory size is unknown"
        meters = [series.meter for series in self._series.values() if series.meter is not None]
        if meters:
            return meters[0].why_not_judged()
        return f"no {rule.held_axis} came, but the rule must hold for {rule.hold}"

    def _judge_host(
        self, event: JudgedEvent, found: Sequence[Reading], alerts: list[Alert]
    ) -> None:
        self._event_seen = True
        figure = self._rule.figure
        for reading in found:
            if reading.name == figure:
                if reading.level is not None:
                    self._take("host", reading.level - self._of_files(event), event, alerts)
                return

    def _without_garbage(
        self, series: _Series, event: JudgedEvent, meter: GrowthMeter, growth: float
    ) -> float | None:
        """Return the growth without Python's garbage; ``None`` if what remains is too small for an alert.

        ``None`` also if the training process has to collect the garbage first.
        """
        if self._rule.figure != "host.rss":
            return growth
        if self._ask_for_garbage is not None:
            self._waiting.append((series, event, growth))
            self._ask_for_garbage()
            return None
        collection = collect_garbage()
        return (
            growth
            if collection is None
            else meter.without_garbage(collection.freed, collection.left)
        )

    def _of_files(self, event: JudgedEvent) -> int:
        """Return the bytes of mapped files, which don't count as growth; 0 if the rule judges no growth."""
        # The kernel can drop the pages of mapped files if memory runs short, so these bytes are no growth.
        if self._rule.growth is None:
            return 0
        if isinstance(event, Sample):
            return event.tree_file or 0 if self._rule.figure == TREE else 0
        return self._files()

    def _judge_devices(
        self, event: JudgedEvent, found: Sequence[Reading], alerts: list[Alert]
    ) -> None:
        self._event_seen = True
        kind, wanted = self._kind, self._rule.device
        for reading in found:
            device = reading.device
            if device is None or not reading.name.endswith(kind):
                continue
            if wanted is None or wanted == device.name:
                self._device_seen = True
                value = self._value(reading, device)
                if value is not None:
                    self._take(device.name, value, event, alerts)

    def _value(self, each: Reading, device: DeviceReading) -> float | None:
        if self._attribute == "fragmentation":
            return fragmentation(device)
        return each.peak if self._attribute == "peak" else each.level

    def _take(self, subject: str, value: float, event: JudgedEvent, alerts: list[Alert]) -> None:
        self._value_read = True
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
                growth = self._without_garbage(series, event, series.meter, growth)
            value, fires = growth or 0.0, growth is not None
        if fires:
            alerts.append(_alert(self._rule, subject, value, event, series.limit))

    def _begin(self, subject: str) -> _Series | None:
        limit = self._limits.get(subject)
        if self._rule.share and not limit:
            self._diagnostics.say_once(
                f"limit of {subject}",
                f"the memory size of {subject} is unknown, so {self._rule.text!r} can't be judged: "
                "write a size in place of %",
            )
            return None
        series = self._series[subject] = _Series(self._rule, limit, self._cooldown_us)
        return series


_NOTHING_CAME: dict[tuple[type[JudgedEvent], ...], str] = {
    (Batch, Epoch, Evaluation): "no step, epoch or evaluation came",
    (Batch,): "no step came",
    (Epoch,): "no epoch came",
    (Sample,): "nothing was sampled",
}


def _bytes_of_files(found: Sequence[Reading]) -> int:
    """Return the bytes of mapped files in the resident set after a step; 0 if unknown."""
    levels = {reading.name: reading.level for reading in found}
    rss, anon, shared = (levels.get(name) for name in (HOST_RSS, HOST_ANON, SHARED))
    return 0 if rss is None or anon is None or shared is None else max(rss - anon - shared, 0)


def _kinds(rule: Rule) -> tuple[type[JudgedEvent], ...]:
    """Return the types of the events that contain the values that a rule judges."""
    if rule.sampled:
        return (Sample,)
    if rule.growth is None:
        return (Batch, Epoch, Evaluation)
    return (Epoch,) if rule.growth.axis == "epoch" else (Batch,)


def _index(event: JudgedEvent, rule: Rule) -> int | None:
    """Return the event's step or epoch, whichever the rule counts; ``None`` if the event has none."""
    if isinstance(event, Evaluation):
        return None
    if rule.growth is not None and rule.growth.axis == "epoch" and isinstance(event, Epoch):
        return event.epoch
    return event.step


def _alert(rule: Rule, subject: str, value: float, event: JudgedEvent, limit: int | None) -> Alert:
    step = None if isinstance(event, Evaluation) else event.step
    return Alert(
        time_us=event.time_us,
        step=step,
        level=rule.level,
        rule=rule.text,
        title=alert_title(rule, subject, value, limit),
        text="",
        value=float(value),
        evaluation=event.evaluation if isinstance(event, Evaluation) else None,
        epoch=event.epoch if isinstance(event, Epoch) and step is None else None,
    )
