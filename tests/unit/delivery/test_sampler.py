"""Times at which the helper samples the process tree: at intervals, and also at steps if steps are fast."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.journals import GIB, MIB, MadeRun, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.sampler import Sampler, StepFollower, _StepRate
from memlog.events import ChildReading, Event, Sample
from memlog.probes.machine import ProcessTree


@pytest.fixture
def trainer() -> Iterator[int]:
    """A small process to sample. Sampling pytest's own process, with its fork servers, takes too long."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


def test_steps_are_worth_a_sample_before_its_time(tmp_path: Path, trainer: int) -> None:
    run = MadeRun(tmp_path)
    found: list[Event] = []
    follower = StepFollower(run.directory.files()[0])
    health = Diagnostics()
    sampler = Sampler(trainer, 1000.0, found.append, follower, health)
    sampler.sample_if_due()
    assert len(found) == 1  # by time: the first
    for begin in (0, 40, 80):
        run.write(*(batch(step, GIB) for step in range(begin, begin + 40)))
        count = len(found)
        deadline = time.monotonic() + 30
        while len(found) == count and time.monotonic() < deadline:
            time.sleep(0.02)
            sampler.sample_if_due()
    assert [event.step for event in found if isinstance(event, Sample)] == [None, 39, 79, 119]
    assert not health.faults


def test_a_step_of_a_run_that_the_helper_does_not_know_yet_has_no_sample(
    tmp_path: Path, trainer: int
) -> None:
    """The sample would belong to the run before, at a step that this run never had."""
    made = MadeRun(tmp_path)
    found: list[Event] = []
    told: set[str] = set()
    sampler = Sampler(
        trainer,
        0.0,
        found.append,
        StepFollower(made.directory.files()[0]),
        Diagnostics(),
        is_told=lambda bindings: {each.run_id for each in bindings.values()} <= told,
    )
    made.write(batch(0, GIB)).bound("mlflow", "second", None).write(batch(1, GIB))
    sampler.sample_now()
    assert found == []
    told.add("second")
    sampler.sample_now()
    assert [event.step for event in found if isinstance(event, Sample)] == [1]


def test_a_run_that_ends_at_once_has_a_sample(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    found: list[Event] = []
    follower = StepFollower(run.directory.files()[0])
    sampler = Sampler(os.getpid(), 1000.0, found.append, follower, Diagnostics())
    sampler.sample_if_due()
    sampler.sample_short_run()  # no step, so no sample is added
    assert len(found) == 1
    run.write(*(batch(step, GIB) for step in range(3)))
    sampler.sample_short_run()
    assert [event.step for event in found if isinstance(event, Sample)] == [None, 2]
    sampler = Sampler(os.getpid(), 1000.0, found.append, follower, Diagnostics())
    sampler.sample_if_due()
    sampler.sample_short_run()  # the steps have had their sample
    assert len(found) == 3


@pytest.mark.parametrize(
    ("total", "swapped"), [("", None), ("SwapTotal: 0 kB", None), ("SwapTotal: 8192 kB", 3 * MIB)]
)
def test_memory_in_swap_is_sampled_if_the_machine_has_swap(
    tmp_path: Path, trainer: int, total: str, swapped: int | None
) -> None:
    proc = tmp_path / "proc"
    (proc / str(trainer)).mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\n{total}\n")
    (proc / str(trainer) / "smaps_rollup").write_text(
        "0-f ---p 0 00:00 0 [rollup]\nPss: 1024 kB\nSwap: 4096 kB\nSwapPss: 3072 kB\n"
    )
    found: list[Event] = []
    follower = StepFollower(MadeRun(tmp_path).directory.files()[0])
    sampler = Sampler(trainer, 1000.0, found.append, follower, Diagnostics())
    sampler._tree = ProcessTree(trainer, proc=proc)
    sampler.sample_if_due()
    [sample] = found
    assert isinstance(sample, Sample)
    assert (sample.tree_pss, sample.tree_swap) == (MIB, swapped)


def looks(steps: int, a_second: float) -> int:
    """Number of samples by steps in a run that is checked every 50 ms."""
    rate, count = _StepRate(), 0
    for look in range(round(steps / a_second / 0.05)):
        if rate.update(int(look * 0.05 * a_second), look * 0.05):
            rate.sampled()
            count += 1
    return count


def test_a_long_run_is_not_sampled_more_often_than_by_time() -> None:
    assert looks(200, 100.0) == 40
    assert looks(200, 10.0) == 40
    assert looks(100_000, 100.0) < 700


def test_it_asks_more_often_where_steps_are_fast_alone() -> None:
    rate = _StepRate()
    assert not rate.is_fast(1.0)  # it makes no step yet
    rate.update(0, 0.0)
    assert rate.is_fast(1.0)  # it may be
    rate.update(10, 0.1)
    assert rate.is_fast(1.0)
    rate.update(11, 1.1)
    assert not rate.is_fast(1.0)


def test_the_first_samples_are_close_however_dear_they_are(tmp_path: Path) -> None:
    """A reading takes 20 ms here. The limit of 2 % of a processor allows one such reading a second."""
    run = MadeRun(tmp_path)
    follower = StepFollower(run.directory.files()[0])
    sampler = Sampler(os.getpid(), 1.0, [].append, follower, Diagnostics())
    pauses = [sampler._shortest_pause(0.02) for _ in range(20)]
    assert pauses[:10] == pytest.approx([0.05] * 10)
    assert pauses[10:] == pytest.approx([1.0] * 10)


def test_children_are_read_between_samples(tmp_path: Path) -> None:
    """If reading has used up its time limit, a whole sample waits for its interval, but children are read."""
    run = MadeRun(tmp_path)
    found: list[Event] = []
    seen: list[tuple[int, Sequence[ChildReading]]] = []
    follower = StepFollower(run.directory.files()[0])
    health = Diagnostics()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        sampler = Sampler(
            os.getpid(), 1000.0, found.append, follower, health, lambda *read: seen.append(read)
        )
        sampler.sample_if_due()
        sampler._not_before = float("inf")
        for begin in (0, 40):
            run.write(*(batch(step, GIB) for step in range(begin, begin + 40)))
            deadline = time.monotonic() + 30
            while (not seen or seen[-1][0] < begin) and time.monotonic() < deadline:
                time.sleep(0.02)
                sampler.sample_if_due()
    finally:
        child.communicate()
    [sample] = found
    assert isinstance(sample, Sample)
    assert [step for step, _ in seen] == [39, 79]
    assert child.pid in [reading.pid for reading in sample.children]
    assert [each.pid for each in seen[0][1]] == [each.pid for each in sample.children]
    assert not health.faults
