"""Evaluation of alert rules: a subscriber that publishes an `Alert` when a threshold is crossed.

The alerts depend only on the rules, the host's limit, the events, and the sizes of mapped files and garbage
in the process. The training process judges its own memory and its devices' memory. The helper process judges
the memory of the process tree and of the machine, because the helper process reads these figures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts.alert_text import alert_title
from memlog.alerts.growth_meter import GrowthMeter
from memlog.alerts.rules import Rule
from memlog.alerts.trigger import Trigger
from memlog.events import Alert, Batch, Device, DeviceReading, Epoch, Evaluation, Event, Sample
from memlog.metrics import fragmentation
from memlog.probes.cgroup import read_cgroup
from memlog.probes.garbage import collect_garbage
from memlog.probes.tree import machine_memory, memory_limit

COOLDOWN_S = 300.0
"""Minimum seconds between two alerts of one rule about the same device or host, by the events' timestamps."""

JudgedEvent: TypeAlias = Batch | Epoch | Evaluation | Sample


def engine_for(
    rules: Sequence[Rule],
    publish: Callable[[Event], object],
    diagnostics: Diagnostics,
    pid: int,
    on_alert: Callable[[Alert], object] = lambda _: None,
    files: Callable[[], int | None] = lambda: None,
    *,
    sampled: bool = False,
) -> AlertEngine | None:
    """Return an engine for the rules that this process judges; ``None`` if there are no such rules.

    This process is the helper process if ``sampled`` is true, and otherwise the training process. ``pid`` is
    the training process's id: ``%`` in a rule about the host refers to `host_limit` of the training process.
    For the other arguments, see `AlertEngine`.
    """
    mine = [rule for rule in rules if rule.sampled == sampled]
    if not mine:
        return None
    shares = any(rule.share and rule.figure.startswith("host.") for rule in mine)
    limit = host_limit(pid) if shares else None
    return AlertEngine(mine, publish, diagnostics, limit=limit, on_alert=on_alert, files=files)


def host_limit(pid: int) -> int | None:
    """Return the limit of a process's memory, in bytes; ``None`` if unknown.

    The limit is the machine's memory or the smallest limit of the process's control groups, whichever is
    smaller. Other processes share this limit.
    """
    return memory_limit(read_cgroup(pid).limit, machine_memory())


class AlertEngine:
    """Subscriber that judges events by rules. It may be called from any thread.

    For each alert, ``publish`` and then ``on_alert`` are called, on the thread of the event that caused the
    alert. ``limit``: bytes that are 100 % in rules about the host; ``None`` if unknown. ``files`` returns
    the bytes of mapped files in this process's resident set, or ``None`` if the bytes are unknown. Growth of
    these bytes does not count for ``grows`` rules.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        publish: Callable[[Event], object],
        diagnostics: Diagnostics,
        *,
        limit: int | None = None,
        cooldown: float = COOLDOWN_S,
        on_alert: Callable[[Alert], object] = lambda _: None,
        files: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._publish = publish
        self._on_alert = on_alert
        self._limits: dict[str, int | None] = {"host": limit}
        # A signal handler may publish while its own thread holds the lock.
        self._lock = threading.RLock()
        self._watches = watches = [
            _Watch(rule, self._limits, diagnostics, round(cooldown * 1e6), files) for rule in rules
        ]
        self._judges: dict[type, tuple[Callable[[Any, list[Alert]], None], ...]] = {
            kind: tuple(watch.judge for watch in watches if kind in watch.kinds)
            for kind in (Batch, Epoch, Evaluation, Sample)
        }

    def __call__(self, event: Event) -> None:
        judges = self._judges.get(type(event))
        if judges:
            alerts: list[Alert] = []
            with self._lock:
                for judge in judges:
                    judge(event, alerts)
            for alert in alerts:
                self._publish(alert)
                self._on_alert(alert)
        elif isinstance(event, Device):
            self._limits[event.name] = event.capacity

    def never_judged(self) -> dict[str, str]:
        """Return the rules whose threshold was never compared with a value, each with the reason."""
        return {watch.text: why for watch in self._watches if (why := watch.why_not_judged())}

    def recall(self, alerts: Iterable[Alert]) -> None:
        """Restore alerts of an earlier helper process, so that their rules do not fire again at once."""
        for watch in self._watches:
            for alert in alerts:
                if alert.rule == watch.text:
                    watch.recall(alert)


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
        files: Callable[[], int | None],
    ) -> None:
        self._rule = rule
        self._files = files
        self._limits = limits
        self._diagnostics = diagnostics
        self._cooldown_us = cooldown_us
        self._series: dict[str, _Series] = {}
        self._attribute = "tree_pss" if rule.attribute == "tree" else rule.attribute
        self.judge = self._judge_host if rule.figure.startswith("host.") else self._judge_devices
        self.kinds = _kinds(rule)
        self.text = rule.text
        self._event_seen = self._device_seen = self._value_read = self._judged = False

    def recall(self, alert: Alert) -> None:
        """Restore this rule's alert about the host. An earlier helper process raised the alert."""
        self._judged = True
        series = self._begin("host")
        if series is not None:
            series.trigger.has_fired(alert.time_us)

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

    def _judge_host(self, event: JudgedEvent, alerts: list[Alert]) -> None:
        self._event_seen = True
        value = getattr(event, self._attribute)
        if value is not None:
            self._take("host", value - self._of_files(event), event, alerts)

    def _without_garbage(self, meter: GrowthMeter, growth: float) -> float | None:
        """Return the growth without Python's garbage; ``None`` if what remains is too small for an alert."""
        if self._rule.figure != "host.rss":
            return growth
        found = collect_garbage()
        return growth if found is None else meter.without_garbage(found.freed, found.left)

    def _of_files(self, event: JudgedEvent) -> int:
        """Return the bytes of mapped files, which don't count as growth; 0 if the rule judges no growth."""
        # The kernel can drop the pages of mapped files if memory runs short, so these bytes are no growth.
        if self._rule.growth is None:
            return 0
        if isinstance(event, Sample):
            return event.tree_file or 0 if self._attribute == "tree_pss" else 0
        return self._files() or 0

    def _judge_devices(self, event: Batch | Epoch | Evaluation, alerts: list[Alert]) -> None:
        self._event_seen = True
        for reading in event.devices:
            if self._rule.device is None or self._rule.device == reading.name:
                self._device_seen = True
                value = self._value(reading)
                if value is not None:
                    self._take(reading.name, value, event, alerts)

    def _value(self, reading: DeviceReading) -> float | None:
        if self._attribute == "fragmentation":
            return fragmentation(reading)
        value: int | None = getattr(reading, self._attribute)
        return value

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
                growth = self._without_garbage(series.meter, growth)
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
