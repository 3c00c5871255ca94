"""The detector judges child processes: workers, processes that pile up, and their shared memory."""

from collections.abc import Sequence

import pytest
from support.growth_detector import detector, sample
from support.journals import GIB, MIB, at

from memlog.events import ChildReading, Sample
from memlog.facts.growth_findings import finding_of


def test_workers_that_grow_are_one_finding_with_the_growth_of_all() -> None:
    judge, reports = detector()
    for number in range(60):
        judge(sample(8 * number, (70, 300 + 8 * number), (71, 300 + 8 * number), (72, 300)))
    judge.finish()
    [confirmed] = reports.confirmed
    assert confirmed.series == "child:DataLoader worker 0"
    assert confirmed.rate == pytest.approx(2 * MIB, rel=0.02)
    assert "DataLoader worker 0, and of 1 more like it, grows" in finding_of(confirmed).title


def test_workers_reborn_at_each_epoch_are_no_growth() -> None:
    """Each new worker begins larger than the one before it, and grows while it warms up."""
    judge, reports = detector()
    for number in range(200):
        epoch, age = divmod(number, 10)
        judge(sample(5 * number, (100 + epoch, 300 + 4 * epoch + 40 * min(age, 2))))
    judge.finish()
    assert reports.confirmed == []


def test_a_worker_that_grows_within_each_epoch_is_found() -> None:
    judge, reports = detector()
    for number in range(40):
        epoch, age = divmod(number, 6)
        judge(sample(10 * number, (100 + epoch, 300 + 9 * age)))
    judge.finish()
    [confirmed] = reports.confirmed
    assert confirmed.series == "child:DataLoader worker 0"
    assert confirmed.step <= 130


def programs(step: int, pids: Sequence[int], size: float = 15) -> Sample:
    """Return a sample of child processes of one program, each with ``size`` MiB."""
    own = int(size * MIB)
    readings = tuple(ChildReading(f"python {n}", p, p, 9 * own, own) for n, p in enumerate(pids))
    return Sample(at(step), step, GIB, 1, GIB, None, None, None, readings, 0)


def test_processes_that_are_started_and_do_not_end_are_one_finding() -> None:
    judge, reports = detector()
    for step in range(0, 300, 5):
        judge(programs(step, range(100, 100 + step // 12)))
    judge(programs(299, range(100, 102)))  # the program ends them at its end
    judge.finish()
    [confirmed] = reports.confirmed
    assert confirmed.series == "processes:python"
    assert confirmed.rate == pytest.approx(15 / 12 * MIB, rel=0.1)
    assert confirmed.processes is not None
    assert 6 <= confirmed.processes <= 25
    assert f"{confirmed.processes} child processes (python)" in finding_of(confirmed).title


def test_processes_that_pile_up_in_a_short_run_are_found() -> None:
    judge, reports = detector()
    for step in range(0, 81, 11):
        judge(programs(step, range(100, 102 + 2 * (step // 12))))
    judge.finish()
    [confirmed] = reports.confirmed
    assert confirmed.series == "processes:python"
    assert confirmed.processes == 12
    assert confirmed.rate == pytest.approx(2 * 15 / 12 * MIB, rel=0.1)
    assert finding_of(confirmed).confidence == "low"


def test_a_pool_that_fills_in_a_short_run_and_two_loaders_are_no_pile() -> None:
    judge, reports = detector()
    for step in range(0, 120, 13):
        judge(programs(step, range(100, 100 + min(8, step // 10))))
    judge.finish()
    assert reports.confirmed == []
    judge, reports = detector()
    for step in range(0, 60, 7):
        judge(programs(step, range(100, 108 if step < 30 else 116)))
    judge.finish()
    assert reports.confirmed == []


def test_processes_that_end_and_few_large_ones_are_no_pile() -> None:
    judge, reports = detector()
    for step in range(0, 600, 5):
        judge(programs(step, range(100 + step // 12, 104 + step // 12 + step // 150)))
    judge.finish()
    assert reports.confirmed == []


def test_readings_between_samples_are_judged_too() -> None:
    judge, reports = detector()
    judge(sample(0, (70, 300)))
    for step in range(5, 150, 5):
        reading = ChildReading("DataLoader worker 0", 70, 70, (300 + step) * MIB)
        judge.detector.take_children(step, [reading])
    judge.finish()
    assert [found.series for found in reports.confirmed] == ["child:DataLoader worker 0"]


def test_shared_memory_of_children_is_judged() -> None:
    judge, reports = detector()
    for number in range(60):
        judge(sample(8 * number, (70, 300), shared=10 + 8 * number))
    judge.finish()
    [found] = reports.confirmed
    assert found.series == "children.shared_memory"
    assert finding_of(found).title == "Shared memory of child processes grows"


def test_shared_memory_of_workers_does_not_hide_that_of_the_training_process() -> None:
    judge, reports = detector()
    for step in range(200):
        judge.step(step, 500, shared=10 + step)
        if step % 8 == 0:
            judge(sample(step, (70, 300), shared=3))
    judge.finish()
    assert [found.series for found in reports.confirmed] == ["shared_memory"]
