"""Rules of growth: no alarm without a leak, and no leak without an alarm."""

import gc
import platform
import zlib
from collections.abc import Iterable, Iterator

import pytest
from support.journals import MIB, at, batch
from support.memory_series import HEALTHY, LEAKS, made

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts import parse_rules
from memlog.alerts.engine import AlertEngine
from memlog.alerts.trigger import GrowthMeter
from memlog.events import Alert, Batch, Event, HeapReading, Sample
from memlog.probes.process import collect_garbage

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads glibc's books")

STEP = "host.rss grows > 5 MiB/step"
HUNDRED = "host.rss grows > 10 MiB/100 steps"
LONG_RISES = {"sawtooth of 25", "ring buffer", "grows, then shrinks"}
"""Healthy series that grow by over 5 MiB at each of 20 or more steps, so an alarm on them is justified."""


def alarms(rule: str, events: Iterable[Event]) -> list[Alert]:
    found: list[Event] = []
    engine = AlertEngine(parse_rules([rule]), found.append, Diagnostics())
    for event in events:
        engine(event)
    assert not engine.never_judged()
    return [event for event in found if isinstance(event, Alert)]


def judged(rule: str, sizes: Iterable[float], *, every: int = 1) -> list[Alert]:
    """Return the alarms for steps of 10 ms with these sizes in MiB, all within the cooldown."""
    by_step = enumerate(sizes)
    return alarms(rule, (batch(n, int(size * MIB)) for n, size in by_step if n % every == 0))


def steps(found: list[Alert]) -> list[int | None]:
    return [alert.step for alert in found]


@pytest.mark.parametrize("length", [100, 300])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_raises_no_alarm(name: str, length: int) -> None:
    for seed in range(5):
        sizes = made(HEALTHY[name], length, zlib.crc32(name.encode()) + seed)
        assert judged(HUNDRED, sizes) == []
        assert name in LONG_RISES or judged(STEP, sizes) == []


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_one_alarm_within_20_steps_of_its_regime(name: str) -> None:
    begins = {"kept losses, after a warm-up of 30 steps": 30, "a jump first": 10}.get(name, 0)
    for seed in range(5):
        sizes = made(LEAKS[name], 100, seed)
        first, *more = judged(STEP, sizes)
        # A leak twice as fast is an alarm of its own, and spikes may delay the first.
        assert begins + 10 < (first.step or 0) < begins + (20 if name != "spikes" else 35)
        assert all((alert.value or 0) >= 2 * (first.value or 0) for alert in more)
        assert steps(judged(HUNDRED, sizes)) == [99]


def test_warm_up_is_no_alarm_and_the_leak_after_it_is() -> None:
    """The first three steps add 300 MiB. An alarm for these steps would hide the leak of 20 MiB a step."""
    warm = [300, 500, 580, 600]
    leak = [600 + 20 * n for n in range(1, 60)]
    [alarm] = judged(STEP, warm + leak)
    assert 12 < (alarm.step or 0) < 24
    assert alarm.title == "host.rss grows 20.0 MiB per step, over 5 MiB"


def test_an_alarm_hides_no_faster_growth() -> None:
    slow = [500 + 6 * n for n in range(40)]
    fast = [slow[-1] + 20 * n for n in range(1, 41)]
    first, second = judged(STEP, slow + fast)
    assert (first.step, round(first.value or 0) // MIB) == (19, 6)
    assert 40 < (second.step or 0) <= 60


def test_an_alarm_hides_no_growth_that_begins_after_it_was_over() -> None:
    leak = [500 + 10.0 * n for n in range(40)]
    flat = [leak[-1]] * 60
    again = [flat[-1] + 10 * n for n in range(1, 41)]
    first, second = judged(STEP, leak + flat + again)
    assert first.step == 19
    assert 112 <= (second.step or 0) <= 120


def test_a_repeated_rise_and_fall_is_one_alarm() -> None:
    assert steps(judged(STEP, [500 + 10.0 * (n % 40) for n in range(400)])) == [19]


@pytest.mark.slow
def test_a_leak_goes_on_for_a_day_in_one_alarm() -> None:
    assert steps(judged(STEP, [500 + 20.0 * n for n in range(20_000)])) == [19]


@pytest.mark.parametrize(
    ("named", "every"),
    [(20, 1), (100, 1), (100, 10), (128, 1), (129, 1), (1000, 1), (1000, 10), (5000, 1)],
)
def test_a_rule_works_in_as_many_steps_as_it_names(named: int, every: int) -> None:
    rule = f"host.rss grows > 10 MiB/{named} steps"
    assert len(judged(rule, [500 + 20 * n / named for n in range(named)], every=every)) == 1


def test_growth_in_stairs_is_found_by_longer_windows() -> None:
    """A copy of 200 MiB is kept at each evaluation, every 40 steps."""
    [alarm] = judged("host.rss grows > 1 MiB/step", [500 + 200.0 * (n // 40) for n in range(400)])
    assert (alarm.value or 0) == pytest.approx(5 * MIB, rel=0.2)


def test_for_n_steps_in_a_growth_rule() -> None:
    rule = "host.rss grows > 1 MiB/step for 50 steps"
    assert steps(judged(rule, [500 + 2.0 * min(n, 40) for n in range(200)])) == []
    assert steps(judged(rule, [500 + 2.0 * n for n in range(200)])) == [49]


def test_a_file_that_is_read_in_is_no_growth() -> None:
    found: list[Event] = []
    engine = AlertEngine(parse_rules([STEP]), found.append, Diagnostics())
    for step in range(100):
        rss = (500 + 20 * step) * MIB
        engine(Batch(at(step), step, rss, None, None, (), 500 * MIB, 0))
    assert found == []


def test_the_training_process_collects_garbage_before_an_alarm() -> None:
    """The engine runs in another process: it asks for a collection, and the answer is an event."""
    found: list[Event] = []
    asked: list[int] = []
    engine = AlertEngine(
        parse_rules([STEP]), found.append, Diagnostics(), ask_for_garbage=lambda: asked.append(1)
    )
    for step in range(40):
        engine(batch(step, (500 + 20 * step) * MIB))
    assert (asked, found) == ([1], [])
    engine(HeapReading(at(40), 39, 100 * MIB, 0, 900 * MIB))  # the whole growth was garbage
    assert found == []
    for step in range(40, 80):
        engine(batch(step, (500 + 20 * step) * MIB))
    assert len(asked) == 2
    engine(HeapReading(at(80), 79, 900 * MIB, 0, 0))
    assert [type(event) for event in found] == [Alert]


def test_an_alarm_does_not_wait_for_a_process_that_has_died() -> None:
    found: list[Event] = []
    engine = AlertEngine(
        parse_rules([STEP]), found.append, Diagnostics(), ask_for_garbage=lambda: None
    )
    for step in range(40):
        engine(batch(step, (500 + 20 * step) * MIB))
    engine.finish()
    assert [type(event) for event in found] == [Alert]


def garbage(size: int) -> None:
    cycle: list[object] = [bytearray(size)]
    cycle.append(cycle)


@glibc
def test_uncollected_garbage_is_not_growth() -> None:
    def events() -> Iterator[Event]:
        for step in range(60):
            if step < 20:
                garbage(MIB)
            yield batch(step, 2048 * step)

    # Growth until step 19 was garbage. Growth from step 19 on is a leak.
    assert steps(alarms("host.rss grows > 1 KiB/step", events())) == [39]


@pytest.mark.parametrize("size", [1, 8])
@glibc
def test_garbage_hides_no_leak_beside_it(size: int) -> None:
    """Garbage is a quarter of the growth, or nearly all of it. The other growth is a leak above the limit."""
    kept: list[bytearray] = []

    def events() -> Iterator[Event]:
        for step in range(60):
            garbage(size * MIB)
            kept.append(bytearray(2 * MIB))
            yield batch(step, (500 + (size + 2) * (step + 1)) * MIB)

    first, *_ = alarms("host.rss grows > 1 MiB/step", events())
    assert first.step == (19 if size == 1 else 39)
    assert (first.value or 0) == pytest.approx(2 * MIB, rel=0.1)


@glibc
def test_young_garbage_is_weighed_where_python_collects_at_all() -> None:
    collect_garbage()
    garbage(50 * MIB)
    found = collect_garbage()
    assert found is not None
    assert 49 * MIB < found.freed < 60 * MIB
    assert found.left > 0
    gc.disable()
    try:
        assert collect_garbage() is None
    finally:
        gc.enable()


def test_samples_count_by_the_step_at_which_they_were_taken() -> None:
    """The lowest of ten samples at each step counts. Mapped files of the process tree don't count."""

    def events() -> Iterator[Event]:
        for look in range(300):
            step, file = look // 10, 300 * look
            held = (500 + 20 * step + 7 * (look % 10) + file) * MIB
            yield Sample(at(look), step, held, 1, None, None, None, file * MIB)

    [alarm] = alarms("host.tree grows > 5 MiB/step", events())
    assert (alarm.step, alarm.title) == (19, "host.tree grows 20.0 MiB per step, over 5 MiB")


def test_steps_that_are_counted_anew_are_another_series() -> None:
    [rule] = parse_rules([STEP])
    meter = GrowthMeter(rule, 5 * MIB, 0)
    resumed = [meter.take(500 * MIB + 20 * MIB * n, n % 15, at(n)) for n in range(90)]
    assert resumed == [None] * 90


def test_its_memory_is_bounded() -> None:
    [rule] = parse_rules(["host.rss grows > 5 MiB/1000000 steps"])
    meter = GrowthMeter(rule, 5 * MIB, 0)
    for step in range(200_000):
        meter.take(500 * MIB, step, at(step))
    held = [len(window.levels) for window in meter._levels.windows]
    assert max(held) == 128
    assert len(held) < 12
