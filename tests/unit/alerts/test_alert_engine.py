"""Events are judged by rules: one alert when a threshold is crossed, none while the value stays near it."""

from collections.abc import Iterable, Sequence

import pytest
from support.journals import GIB, MIB, at, batch, cuda

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts import parse_rules
from memlog.alerts.engine import AlertEngine, engine_for, host_limit
from memlog.console import Console, alert_line
from memlog.events import Alert, Batch, Device, DeviceReading, Epoch, Evaluation, Event, Sample
from memlog.metrics import axis_and_index, values
from memlog_mlflow.alerts import alert_table, alert_tags


def alerts(
    rules: str | Sequence[str],
    events: Iterable[Event],
    *,
    limit: int | None = 10 * GIB,
    cooldown: float = 300.0,
) -> list[Alert]:
    found: list[Event] = []
    texts = [rules] if isinstance(rules, str) else rules
    engine = AlertEngine(
        parse_rules(texts), found.append, Diagnostics(), limit=limit, cooldown=cooldown
    )
    for event in events:
        engine(event)
    assert all(isinstance(event, Alert) for event in found)
    return found  # type: ignore[return-value]


def steps_of(found: list[Alert]) -> list[int | None]:
    return [alert.step for alert in found]


def rss(*sizes: float | None) -> list[Event]:
    """Return steps of 0.1 s with these sizes in GiB."""
    return [batch(n, None if size is None else int(size * GIB)) for n, size in enumerate(sizes)]


def epoch(number: int, size: int | None, *devices: DeviceReading) -> Epoch:
    return Epoch(at(number), number, number * 10 + 9, size, None, None, devices)


@pytest.mark.seed(163)
def test_a_constant_87_percent_is_one_alert() -> None:
    [alert] = alerts("host.rss > 80%", rss(*[8.7] * 100_000))
    assert alert == Alert(
        time_us=at(0),
        step=0,
        level="warning",
        rule="host.rss > 80%",
        title="host.rss is 8.7 GiB, over 80% of 10.0 GiB",
        text="",
        value=int(8.7 * GIB),
    )


def test_it_fires_as_the_threshold_is_crossed() -> None:
    assert steps_of(alerts("host.rss > 4 GiB", rss(3, 4, 4.1, 5, 9))) == [2]
    assert steps_of(alerts("host.rss >= 4 GiB", rss(3, 4, 4.1, 5, 9))) == [1]
    assert steps_of(alerts("host.rss < 4 GiB", rss(9, 5, 4, 3.9, 3))) == [3]
    assert steps_of(alerts("host.rss <= 4 GiB", rss(9, 5, 4, 3.9, 3))) == [2]


def test_values_around_the_threshold_raise_one_alert() -> None:
    hovering = rss(*[4.1, 3.9] * 1000)
    assert steps_of(alerts("host.rss > 4 GiB", hovering, cooldown=0)) == [0]
    assert steps_of(alerts("host.rss < 4 GiB", hovering, cooldown=0)) == [1]


def test_it_fires_again_after_the_value_was_clearly_back() -> None:
    assert steps_of(alerts("host.rss > 4 GiB", rss(5, 3.9, 5, 3.8, 5), cooldown=0)) == [0, 4]
    assert steps_of(alerts("host.rss < 4 GiB", rss(3, 4.1, 3, 4.3, 3), cooldown=0)) == [0, 4]


def test_flapping_is_held_down_by_the_events_own_time() -> None:
    found = alerts("host.rss > 4 GiB", rss(*[9, 1] * 5000))
    assert [alert.time_us for alert in found] == [at(0), at(300), at(600), at(900)]


def test_a_value_that_stays_above_is_alerted_after_the_cooldown() -> None:
    assert steps_of(alerts("host.rss > 4 GiB", rss(9, 1, *[9] * 4000))) == [0, 3000]


def test_a_clock_that_was_set_back_suppresses_no_alert() -> None:
    late, early = [Batch(time, 0, 9 * GIB, None, None) for time in (at(9e6), at(0))]
    back = Batch(at(0), 0, GIB, None, None)
    assert len(alerts("host.rss > 4 GiB", [late, back, early])) == 2


def test_a_condition_for_some_steps() -> None:
    rule = "host.rss > 4 GiB for 3 steps"
    assert steps_of(alerts(rule, rss(5, 5, 3.9, 5, 5, 3.9))) == []
    [alert] = alerts(rule, rss(5, 5, 3.9, 5, 5, 5, 5))
    assert alert.step == 5
    assert alert.title == "host.rss is 5.0 GiB, over 4 GiB for 3 steps"


def test_a_condition_for_some_steps_counts_unrecorded_steps() -> None:
    recorded = [batch(step, 5 * GIB) for step in range(0, 60, 10)]
    assert steps_of(alerts("host.rss > 4 GiB for 25 steps", recorded)) == [30]


def test_the_unknown_neither_fires_nor_ends_anything() -> None:
    assert alerts(["host.rss > 4 GiB", "host.rss < 4 GiB"], rss(None, None)) == []
    assert steps_of(alerts("host.rss > 4 GiB", rss(5, None, 5), cooldown=0)) == [0]
    assert steps_of(alerts("host.rss > 4 GiB for 3 steps", rss(5, None, 5))) == [2]
    gaps = DeviceReading("mps0", None, None, None, None, None)
    rules = ["device.allocated < 1 GiB", "device.fragmentation > 0.1", "device.peak < 50%"]
    assert alerts(rules, [batch(0, None, gaps)]) == []


def test_an_unknown_limit_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert alerts("host.rss > 80%", rss(9, 9, 9), limit=None) == []
    assert caplog.text.count("write a size in place of %") == 1


def test_each_device_is_judged_by_its_own_capacity() -> None:
    devices = [Device(at(0), "cuda0", "A", 10 * GIB), Device(at(0), "cuda1", "B", 20 * GIB)]
    both = [batch(n, None, cuda(n * GIB), cuda(n * GIB, index=1)) for n in range(20)]
    found = alerts("device.allocated > 50%", [*devices, *both])
    assert [(alert.step, alert.title) for alert in found] == [
        (6, "cuda0.allocated is 6.0 GiB, over 50% of 10.0 GiB"),
        (11, "cuda1.allocated is 11.0 GiB, over 50% of 20.0 GiB"),
    ]
    assert steps_of(alerts("cuda1.allocated > 50%", [*devices, *both])) == [11]


def test_fragmentation() -> None:
    reading = DeviceReading("cuda0", 0, 100, 0, "exact", 43)
    [alert] = alerts("error: device.fragmentation > 0.4", [batch(7, None, reading)])
    assert (alert.level, alert.title) == ("error", "cuda0.fragmentation is 0.43, over 0.4")
    assert alert.value == 0.43


@pytest.mark.seed(139, 252)
def test_growth_an_epoch() -> None:
    sizes = [500, 505, 525, 526, 540, 556, 557]  # a jump is no growth, two rises in a row are
    found = alerts(
        "host.rss grows > 10 MiB/epoch", [epoch(n, s * MIB) for n, s in enumerate(sizes)]
    )
    assert [(alert.step, alert.title) for alert in found] == [
        (59, "host.rss grows 15.0 MiB per epoch, over 10 MiB")
    ]


def test_growth_for_some_epochs() -> None:
    rule = "host.rss grows > 10 MiB/epoch for 3 epochs"
    grown = [0, 20, 40, 60, 80]
    assert steps_of(alerts(rule, [epoch(n, s * MIB) for n, s in enumerate(grown)])) == [39]
    gaps = [0, 20, 40, 41, 60, 80]
    assert alerts(rule, [epoch(n, s * MIB) for n, s in enumerate(gaps)]) == []


def test_evaluations_are_judged_and_lie_on_their_own_axis() -> None:
    calls = [Evaluation(at(n), n, 0.5, n * GIB) for n in range(9)]
    [alert] = alerts("host.rss > 4 GiB", calls)
    assert (alert.time_us, alert.step) == (at(5), None)
    assert axis_and_index(alert) == ("evaluation", 5)


def test_samples_and_steps_are_judged_by_one_engine() -> None:
    rules = parse_rules(["host.rss > 1 GiB", "host.tree > 2 GiB", "host.available < 1 GiB"])
    found: list[Event] = []
    engine = engine_for(rules, found.append, Diagnostics(), pid=0)
    assert engine is not None
    engine(batch(0, 9 * GIB))
    engine(Sample(at(1), 3, 3 * GIB, 2, MIB, None, None))
    assert [(alert.step, alert.title) for alert in found if isinstance(alert, Alert)] == [
        (0, "host.rss is 9.0 GiB, over 1 GiB"),
        (3, "host.tree is 3.0 GiB, over 2 GiB"),
        (3, "host.available is 1.0 MiB, under 1 GiB"),
    ]
    assert engine_for([], found.append, Diagnostics(), pid=0) is None


def test_an_alert_is_a_metric_of_1_at_its_step() -> None:
    [alert] = alerts("host.rss > 1 GiB", rss(0, 0, 2))
    assert axis_and_index(alert) == ("step", 2)
    assert list(values(alert)) == [("memory/step/alert", 1.0, "max")]


def test_an_alert_without_steps_stands_at_its_evaluation_or_epoch() -> None:
    [alert] = alerts("host.rss > 1 GiB", [Evaluation(at(1), 3, 0.5, 2 * GIB)])
    assert (alert.step, alert.evaluation, alert.epoch) == (None, 3, None)
    assert axis_and_index(alert) == ("evaluation", 3)
    assert list(values(alert)) == [("memory/eval/alert", 1.0, "max")]
    assert alert_line(alert).endswith("over 1 GiB (at evaluation 3)")
    assert alert_tags([alert])["memlog.alert.last"].endswith("(evaluation 3)")
    assert alert_table([alert])["alerts"][0]["evaluation"] == 3
    stepless = Epoch(at(1), 2, None, 2 * GIB, None, None)
    [alert] = alerts("host.rss > 1 GiB", [stepless])
    assert axis_and_index(alert) == ("epoch", 2)
    assert list(values(alert)) == [("memory/epoch/alert", 1.0, "max")]
    assert alert_line(alert).endswith("(at epoch 2)")
    assert steps_of(alerts("host.rss > 1 GiB", [epoch(1, 2 * GIB)])) == [19]


def test_the_console_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    [alert] = alerts("host.rss > 32 GiB", [batch(120, int(33.1 * GIB))])
    Console(0)(alert)
    printed = capsys.readouterr()
    assert printed.err == "memlog: warning: host.rss is 33.1 GiB, over 32 GiB (step 120)\n"
    assert printed.out == ""
    assert alert_line(Alert(0, None, "info", "r", "t", "x")) == "memlog: info: t: x"


def test_the_hosts_limit_is_read() -> None:
    assert (host_limit(0) or 0) > 16 * MIB


@pytest.mark.parametrize(
    ("rule", "events", "why"),
    [
        ("device.allocated > 90%", [batch(0, GIB)], "there was no accelerator"),
        ("cuda0.allocated > 1 GiB", [batch(0, GIB)], "there was no cuda0"),
        ("xpu7.peak > 1 GiB", [batch(0, GIB, cuda(GIB))], "there was no xpu7"),
        ("cuda0.allocated > 90%", [batch(0, GIB, cuda(GIB))], "the memory size is unknown"),
        ("host.rss > 1 GiB", [batch(0, None)], "rss could not be read"),
        ("host.rss > 1 GiB", [], "no step, epoch or evaluation came"),
        (
            "host.rss > 1 GiB for 5 steps",
            [Evaluation(0, 0, 1.0, GIB)],
            "no step came, but the rule must",
        ),
        ("host.rss grows > 10 MiB/epoch", [batch(0, GIB)], "no epoch came"),
        ("host.rss grows > 10 MiB/epoch", [epoch(0, GIB)], "fewer than 3 epochs came"),
        ("host.rss grows > 10 MiB/step", [epoch(0, GIB)], "no step came"),
        (
            "host.rss grows > 10 MiB/100 steps",
            [batch(step, GIB) for step in range(99)],
            "fewer than 100 steps came",
        ),
        (
            "host.rss grows > 10 MiB/100 steps",
            [batch(step, GIB) for step in range(0, 200, 50)],
            "it was read fewer than 10 times",
        ),
    ],
)
def test_a_rule_that_can_not_be_judged_says_why(rule: str, events: list[Event], why: str) -> None:
    engine = AlertEngine(parse_rules([rule]), print, Diagnostics(), limit=GIB)
    for event in events:
        engine(event)
    assert engine.never_judged().keys() == {rule}
    assert engine.never_judged()[rule].startswith(why)


def test_a_rule_that_was_judged_is_not_named() -> None:
    rules = ["host.rss > 90%", "device.peak > 90 GiB", "host.rss grows > 1 TiB/epoch"]
    engine = AlertEngine(parse_rules(rules), print, Diagnostics(), limit=10 * GIB)
    for event in (batch(0, GIB, cuda(GIB)), *(epoch(n, GIB) for n in range(3))):
        engine(event)
    assert engine.never_judged() == {}
