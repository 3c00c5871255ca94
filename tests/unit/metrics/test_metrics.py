"""The plan: the same journal gives the same points, and no peak is lost in a bucket."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlog.events import (
    Alert,
    Batch,
    DeviceReading,
    Epoch,
    Evaluation,
    Event,
    Finding,
    Health,
    Loss,
    Sample,
    Trace,
    TracedLayer,
)
from memlog.metrics import Plan, alert_in_run, bucket_start, fragmentation, parameters_of, values
from memlog.sink import Point, Resolution

MIB = 1024**2


def batch(step: int, rss: int = 100, peak: int | None = None) -> Batch:
    return Batch(step * 10, step, rss * MIB, (peak or rss) * MIB, "watermark")


def plan_points(
    events: Sequence[Event], resolution: Resolution = "bucketed", initial_step: int = 0
) -> list[Point]:
    plan: Plan[int] = Plan(resolution, initial_step)
    points = [point for at, event in enumerate(events) for point in plan.feed(event, at)]
    return points + plan.flush()


def named(points: list[Point], name: str) -> list[tuple[int, float]]:
    return [(point.index, point.value) for point in points if point.name == name]


def test_a_batch_has_its_own_point_at_its_own_time() -> None:
    points = plan_points([batch(0, 10), batch(1, 20)])
    assert named(points, "memory/host/rss_mib") == [(0, 10.0), (1, 20.0)]
    assert [point.time_us for point in points if point.name == "memory/host/rss_mib"] == [0, 10]


def test_a_finding_has_no_point() -> None:
    found = Finding(5, 1, "growth", "Memory grows.", None, 1, 2.5, (100, 120), 1000)
    assert {point.name for point in plan_points([batch(0), found, batch(1)])} == {
        point.name for point in plan_points([batch(0), batch(1)])
    }


@pytest.mark.seed(165, 249)
def test_devices_have_names_of_their_own_and_the_unknown_has_none() -> None:
    known = DeviceReading("cuda0", 1 * MIB, 4 * MIB, 3 * MIB, "exact", 1 * MIB)
    gaps = DeviceReading("mps0", 1 * MIB, 2 * MIB, None, None, None)
    points = plan_points([Batch(0, 0, None, None, None, (known, gaps))])
    assert {point.name: point.value for point in points} == {
        "memory/cuda0/allocated_mib": 1.0,
        "memory/cuda0/reserved_mib": 4.0,
        "memory/cuda0/peak_mib": 3.0,
        "memory/cuda0/fragmentation": 0.25,
        "memory/mps0/allocated_mib": 1.0,
        "memory/mps0/reserved_mib": 2.0,
    }


def test_retries_failures_and_private_pools_are_series_only_if_there_are_any() -> None:
    sizes = MIB, 4 * MIB, 3 * MIB, "exact", None
    usual = DeviceReading("cuda0", *sizes, 0, 0, 0)
    rare = DeviceReading("cuda1", *sizes, 2 * MIB, 7, 1)
    points = plan_points([Batch(0, 0, None, None, None, (usual, rare))])
    added = {point.name: point.value for point in points}
    for name in ("allocated_mib", "reserved_mib", "peak_mib"):
        assert f"memory/cuda0/{name}" in added
        del added[f"memory/cuda0/{name}"], added[f"memory/cuda1/{name}"]
    assert added == {
        "memory/cuda1/private_pools_mib": 2.0,
        "memory/cuda1/retries": 7.0,
        "memory/cuda1/ooms": 1.0,
    }


@pytest.mark.seed(205)
def test_fragmentation_of_nothing_reserved_is_unknown() -> None:
    assert fragmentation(DeviceReading("cuda0", 0, 0, 0, "exact", 0)) is None


def test_the_three_axes_are_never_mixed() -> None:
    events = [
        batch(3),
        Evaluation(1, 7, 0.5, MIB),
        Epoch(2, 1, 3, MIB, MIB, "exact"),
        Loss(3, 3, 0.25),
    ]
    axes = {point.name: (point.axis, point.index) for point in plan_points(events)}
    assert axes["memory/host/rss_mib"] == ("step", 3)
    assert axes["memory/eval/host/rss_mib"] == ("evaluation", 7)
    assert axes["memory/eval/loss"] == ("evaluation", 7)
    assert axes["memory/epoch/host/rss_mib"] == ("epoch", 1)
    assert axes["memory/step/loss"] == ("step", 3)


def test_samples_before_the_first_step_have_no_place_on_the_axis() -> None:
    assert plan_points([Sample(1, None, MIB, 1, MIB, None, None)]) == []


def test_several_samples_of_one_step_keep_what_was_worst() -> None:
    samples = [
        Sample(t, 4, tree * MIB, 1, free * MIB, None, None)
        for t, tree, free in [(1, 5, 9), (2, 8, 3), (3, 6, 7)]
    ]
    points = plan_points(samples)
    assert named(points, "memory/host/tree_mib") == [(4, 8.0)]
    assert named(points, "memory/host/available_mib") == [(4, 3.0)]


@pytest.mark.parametrize(
    ("offset", "start"),
    [
        (0, 0),
        (9_999, 9_999),
        (10_000, 10_000),
        (10_009, 10_000),
        (99_999, 99_990),
        (100_099, 100_000),
        (1_234_567, 1_234_000),
    ],
)
def test_bucket_starts(offset: int, start: int) -> None:
    assert bucket_start(offset) == start


@given(st.integers(0, 10**9))
def test_buckets_cover_the_axis_without_gap_or_overlap(offset: int) -> None:
    start = bucket_start(offset)
    assert start <= offset
    assert bucket_start(start) == start
    assert start == 0 or bucket_start(start - 1) < start


def test_a_million_steps_stay_bearable_and_keep_every_peak() -> None:
    spike = 456_789
    steps = range(400_000, 500_000)
    events = [batch(step, 100, 900 if step == spike else 100) for step in steps]
    points = named(plan_points(events), "memory/host/rss_peak_mib")
    assert len(points) == len(steps) / 100
    assert (spike, 900.0) in points


def test_full_resolution_keeps_every_step() -> None:
    events = [batch(step) for step in range(50_000, 50_100)]
    assert len(named(plan_points(events, "full"), "memory/host/rss_mib")) == 100


def test_a_resumed_run_has_a_point_a_step_from_where_it_began() -> None:
    events = [batch(step) for step in range(1_000_000, 1_000_100)]
    points = plan_points(events, initial_step=1_000_000)
    assert len(named(points, "memory/host/rss_mib")) == 100


def test_a_loss_that_comes_late_keeps_its_batch() -> None:
    points = plan_points([batch(0), batch(1), Loss(15, 0, 0.5), batch(2)])
    assert named(points, "memory/step/loss") == [(0, 0.5)]


@given(
    st.lists(st.tuples(st.integers(0, 120_000), st.integers(1, 500)), min_size=1, max_size=60),
    st.data(),
)
def test_going_on_from_where_a_plan_was_open_yields_the_rest(
    readings: list[tuple[int, int]], data: st.DataObject
) -> None:
    """An uploader that replaces a dead one feeds a new plan from `open_since` on."""
    events = [batch(step, rss) for step, rss in sorted(readings)]
    cut = data.draw(st.integers(0, len(events)))
    first: Plan[int] = Plan("bucketed")
    before = [point for at, e in enumerate(events[:cut]) for point in first.feed(e, at)]
    resume = min(first.open_since.values(), default=cut)
    second: Plan[int] = Plan("bucketed")
    after = []
    for at, event in enumerate(events[resume:], resume):
        points = second.feed(event, at)
        after += points if at >= cut else []
    assert before + after + second.flush() == plan_points(events)


ALERT = Alert(2, 5, "warning", "host.rss > 1 GiB", "host.rss is 2 GiB", "")
LAYERS = (
    TracedLayer("blocks.0", 3 * MIB, 9 * MIB, MIB, MIB, 2 * MIB),
    TracedLayer("head", MIB, 9 * MIB, MIB, MIB, MIB, in_series=False),
    TracedLayer("(outside modules)", 2 * MIB, 9 * MIB, MIB, MIB),
)


def trace(step: int) -> Trace:
    return Trace(3, step, "dispatch", True, 9 * MIB, {"activations": 6 * MIB}, LAYERS, 0)


def health(step: int, dropped: int = 0, faults: int = 0, steps: int | None = None) -> Health:
    lost = {"labels": dropped} if dropped else {}
    failed = {"somewhere": faults} if faults else {}
    return Health(4, step, 0.25, 30.0, lost, failed, steps=steps)


def groups(points: Sequence[Point]) -> list[str]:
    """Return groups as MLflow forms and sorts them: the text before the last ``/``, by code point."""
    return sorted({point.name.rpartition("/")[0] for point in points})


def test_memory_comes_first_and_all_layers_are_one_group() -> None:
    events = [batch(5), Loss(1, 5, 0.5), ALERT, trace(5), health(5)]
    expected = ["memory/host", "memory/layers", "memory/step", "memory/trace"]
    assert groups(plan_points(events)) == expected


def test_a_layers_series_are_its_part_of_the_peak_and_what_it_added() -> None:
    found = {point.name: point.value for point in plan_points([trace(5)])}
    assert {name: value for name, value in found.items() if "/layers/" in name} == {
        "memory/layers/blocks.0.at_peak_mib": 3.0,
        "memory/layers/blocks.0.peak_mib": 2.0,
        "memory/layers/outside modules.at_peak_mib": 2.0,
    }


def test_trackers_get_memlogs_own_figures_only_if_something_went_wrong() -> None:
    assert plan_points([health(5)]) == []
    assert [(p.name, p.value) for p in plan_points([health(5, dropped=3)])] == [
        ("memlog/dropped", 3)
    ]
    assert [(p.name, p.value) for p in plan_points([health(5, faults=1)])] == [("memlog/faults", 1)]


def test_all_of_memlogs_own_figures_are_known_and_are_parameters_at_the_end() -> None:
    assert {value.name: value.value for value in values(health(5))} == {
        "memlog/overhead_ms": 0.25,
        "memlog/dropped": 0,
        "memlog/faults": 0,
    }
    assert parameters_of(health(5)) is None
    assert parameters_of(batch(5)) is None
    closing = parameters_of(health(5, dropped=2, steps=40))
    assert closing is not None
    assert closing.values == {"overhead_ms": "0.75", "dropped": "2", "faults": "0"}
    no_steps = parameters_of(health(5, steps=0))
    assert no_steps is not None
    assert no_steps.values == {"dropped": "0", "faults": "0"}


def test_a_journal_of_an_older_memlog_keeps_its_names() -> None:
    plan: Plan[int] = Plan("full", older=True)
    events = [ALERT, Loss(1, 5, 0.5), trace(5), health(5)]
    points = [point for at, event in enumerate(events) for point in plan.feed(event, at)]
    assert {point.name for point in points + plan.flush()} == {
        "memlog/alert",
        "memlog/loss",
        "memlog/overhead_ms",
        "memlog/dropped",
        "memlog/faults",
        "memory/trace/peak_mib",
        "memory/trace/activations_mib",
        *(
            f"memory/layers/{layer.path}/{name}"
            for layer in LAYERS
            for name in ("at_peak_mib", "peak_mib")
        ),
    }


def test_an_alert_of_a_later_run_has_that_runs_step() -> None:
    alert = Alert(1, 25, "warning", "rule", "memory grows since step 21", "2 MiB per step.")
    shown = alert_in_run(alert, 20)
    assert (shown.step, shown.title) == (5, alert.title)
    assert shown.text == (
        "2 MiB per step. (Steps in this text are the session's: subtract 20 to get this run's step.)"
    )
    plain = msgspec.structs.replace(alert, title="host.rss > 90 %", text="")
    assert alert_in_run(plain, 20) == msgspec.structs.replace(plain, step=5)
    assert alert_in_run(alert, 0) is alert


def test_what_lies_before_a_runs_first_step_has_no_point_in_it() -> None:
    plan: Plan[int] = Plan("full", offset=20)
    assert plan.feed(Loss(1, 19, 0.5), 0) == []
    assert plan.feed(Batch(2, 20, 1, 1, "exact"), 1) == []
    assert {point.index for point in plan.flush()} == {0}


def test_a_later_runs_points_are_grouped_from_its_own_start() -> None:
    plan: Plan[int] = Plan("bucketed", offset=50_000)
    points = [
        p for step in range(50_000, 50_100) for p in plan.feed(Batch(1, step, 1, None, None), 0)
    ]
    assert [point.index for point in [*points, *plan.flush()]] == list(range(100))
