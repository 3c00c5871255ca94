"""The detector: the series that it judges, and its reports."""

import ctypes
import gc
import math
import platform
from collections.abc import Callable
from itertools import pairwise

import pytest
from support.growth_detector import detector, free
from support.journals import GIB, MIB, at

from memlog.events import (
    Batch,
    Device,
    DeviceReading,
    Event,
    Finding,
    Inquiry,
    Sample,
    StepInputs,
    TensorInput,
)
from memlog.facts.detector import GrowthDetector
from memlog.facts.growth_findings import GrowthFindings, finding_of
from memlog.growth import Growth
from memlog.growth.series import Suspicion, forecast
from memlog.leaks import other_causes
from memlog.probes.process import collect_garbage

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads glibc's books")


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_of_other_tests() -> None:
    gc.collect()


@glibc
def test_growth_of_the_process_is_suspected_and_then_confirmed() -> None:
    judge, reports = detector()
    for step in range(600):
        judge.step(step, 500 + 2 * step)
    [suspected], [confirmed] = reports.suspected, reports.confirmed
    assert (suspected.series, confirmed.series) == ("host.anon", "host.anon")
    assert suspected.step <= 64
    assert confirmed.step >= suspected.step + 32
    assert confirmed.since_step <= 5
    assert confirmed.rate == pytest.approx(2 * MIB, rel=0.02)
    assert confirmed.limit is not None
    judge.finish()
    assert len(reports.confirmed) == 1


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("takes", [0.0, 1.0])
def test_a_buffer_that_fills_is_no_growth(takes: float, *, is_shared: bool) -> None:
    """``takes``: part of the growth for which the process takes address space."""
    confirmed: list[Suspicion] = []
    judge = GrowthDetector(free, confirmed.append)
    for step in range(300):
        level = 500 * MIB + step * MIB // 8
        anon, shared = (500 * MIB, level) if is_shared else (level, 0)
        taken = 2000 * MIB + int(step * takes) * MIB // 8
        private, other = (MIB, taken) if is_shared else (taken, MIB)
        judge(Batch(at(step), step, level, None, None, (), anon, shared, (private, other)))
    judge.finish()
    assert len(confirmed) == (1 if takes else 0)


def test_a_leak_that_begins_when_a_buffer_is_full_is_growth() -> None:
    confirmed: list[Suspicion] = []
    judge = GrowthDetector(free, confirmed.append)
    for step in range(400):
        level, space = (500 + step) * MIB, (2000 + max(step - 200, 0)) * MIB
        judge(Batch(at(step), step, level, None, None, (), level, 0, (space, None)))
        assert not confirmed or step > 250
    judge.finish()
    assert len(confirmed) == 1


def test_growth_whose_holder_is_known_is_no_buffer_that_fills() -> None:
    """Some allocators take address space long before they use it."""
    confirmed: list[Suspicion] = []
    judge = GrowthDetector(free, confirmed.append)
    holder = Finding(at(50), 50, "kept_tensors", "`kept`, a list", "kept", 0, MIB, None, None)
    judge(Inquiry(at(50), 50, "host.anon", False, (holder,)))
    for step in range(300):
        level = (500 + step) * MIB
        judge(Batch(at(step), step, level, None, None, (), level, 0, (2000 * MIB, None)))
    judge.finish()
    assert len(confirmed) == 1


def test_address_space_that_a_search_gives_back_hides_no_growth() -> None:
    confirmed: list[Suspicion] = []
    judge = GrowthDetector(free, confirmed.append)
    for step in range(300):
        level, searches = (500 + step) * MIB, 60 <= step < 90
        private = (2000 + step + (200 if searches else 0)) * MIB
        judge(Batch(at(step), step, level, None, None, (), level, 0, (private, None)))
        judge(Inquiry(at(step), step, "host.anon", searches))
    judge.finish()
    assert len(confirmed) == 1


def test_a_mapped_file_is_no_growth() -> None:
    judge, reports = detector()
    for step in range(300):
        judge.step(step, 500)
    judge.finish()
    assert reports == ([], [], [])


def test_a_short_run_that_leaks_until_its_end_is_confirmed_then() -> None:
    judge, reports = detector()
    for step in range(45):
        judge.step(step, 500 + 2 * step)
    assert reports.confirmed == []
    judge.finish()
    assert len(reports.confirmed) == 1


def test_a_run_can_be_judged_before_more_steps_follow() -> None:
    judge, reports = detector()
    for step in range(45):
        judge.step(step, 500 + 2 * step)
    for _ in range(2):
        judge.finish()
        assert len(reports.confirmed) == 1
    for step in range(45, 400):
        judge.step(step, 500 + 2 * step)
    judge.finish()
    assert len(reports.confirmed) == 1
    for step in range(400, 700):
        judge.step(step, 1300 + 10 * (step - 400))
    judge.finish()
    assert [round(one.rate / MIB) for one in reports.confirmed] == [2, 10]


def test_a_cache_that_still_fills_when_it_is_judged_is_reported_once() -> None:
    judge, reports = detector()
    for step in range(300):
        if step in (40, 80, 120):
            judge.finish()
        judge.step(step, 500 + 2 * min(step, 60))
    judge.finish()
    assert len(reports.confirmed) == 1  # as if the run had ended after 40 steps


def test_a_cache_that_fills_is_withdrawn() -> None:
    judge, reports = detector()
    for step in range(300):
        judge.step(step, 500 + 2 * min(step, 60))
    judge.finish()
    assert len(reports.suspected) == len(reports.withdrawn) == 1
    assert reports.confirmed == []


def test_each_series_is_judged_by_itself() -> None:
    judge, reports = detector()
    judge(Device(at(0), "cuda0", "Made-up", 4000 * MIB))
    for step in range(400):
        judge.step(step, 500, shared=10 + step, device=100 + 2 * step)
    judge.finish()
    by_series = {found.series: found for found in reports.confirmed}
    assert set(by_series) == {"shared_memory", "cuda0.allocated"}
    device = by_series["cuda0.allocated"]
    assert device.limit == pytest.approx(4000 * MIB, rel=0.01)
    assert device.forecast is not None
    low, high = device.forecast
    assert low - 20 <= 1950 <= high + 20


def test_a_device_that_shares_the_hosts_memory_can_grow_by_what_the_machine_can_give() -> None:
    def limit(*, shares_host: bool) -> float:
        judge, reports = detector()
        judge(Device(at(0), "cuda0", "Made-up", 4000 * MIB, shares_host=shares_host))
        for step in range(400):
            judge(Sample(at(step), step, GIB, 1, (1100 - 2 * step) * MIB, None, None))
            judge.step(step, 500, device=100 + 2 * step)
        (found,) = reports.confirmed
        return found.limit or 0

    assert limit(shares_host=False) == pytest.approx(4000 * MIB, rel=0.01)
    assert limit(shares_host=True) == pytest.approx(1200 * MIB, rel=0.01)


def fragmented(
    reserved: Callable[[int], float],
    peak: Callable[[int], float] = lambda _: 1100,
    pools: Callable[[int], float] = lambda _: 0,
) -> list[Finding]:
    """Return the findings on a device whose tensors hold 1,000 MiB, from made-up figures in MiB.

    As with expandable segments, ``inactive_split`` is unknown.
    """
    found: list[Event] = []
    judge = GrowthDetector(free, GrowthFindings(found.append))
    for step in range(1000):
        sizes = 1000 * MIB, int(reserved(step) * MIB), int(peak(step) * MIB)
        pool = int(pools(step) * MIB)
        device = DeviceReading("cuda0", *sizes, "exact", None, private_pools=pool)
        judge(Batch(at(step), step, GIB, None, None, (device,)))
    judge.finish()
    return [one for one in found if isinstance(one, Finding)]


def test_a_reserve_that_grows_while_tensors_never_hold_more_is_fragmentation() -> None:
    [found] = fragmented(lambda step: 1200 + 20 * (step // 20))
    assert (found.kind, found.where, found.forecast) == ("device_fragmentation", "cuda0", None)
    assert found.rate == pytest.approx(MIB, rel=0.05)
    assert found.step is not None
    assert found.step >= 400


def test_no_fragmentation_if_the_cache_is_steady_or_grows_with_the_steps() -> None:
    assert not fragmented(lambda _: 5000)
    assert not fragmented(lambda step: 1200 + min(step, 300))
    assert not fragmented(lambda step: 1200 + step, peak=lambda step: 1100 + step)
    # The peak of one evaluation leaves a large cache.
    assert not fragmented(
        lambda step: 1200 if step < 300 else 9000, peak=lambda step: 8500 if step == 300 else 1100
    )
    # Larger steps leave some percent more unused.
    assert not fragmented(lambda step: 1200 + 1.1 * step, peak=lambda step: 1100 + step)


def test_pools_that_grow_are_pools_and_no_fragmentation() -> None:
    [found] = fragmented(lambda step: 1200 + step, pools=lambda step: step)
    assert (found.kind, found.where) == ("graph_pools", "cuda0")
    assert found.rate == pytest.approx(MIB, rel=0.05)


def garbage(size: int) -> None:
    cycle: list[object] = [bytearray(size)]
    cycle.append(cycle)


@glibc
def test_garbage_that_the_collector_frees_is_not_suspected() -> None:
    judge, reports = detector()
    collect_garbage()
    assert gc.isenabled()
    for step in range(60):
        garbage(MIB)
        judge.step(step, 500 + step)
    assert reports.suspected == []


@glibc
@pytest.mark.parametrize("steps", [45, 200])
def test_garbage_that_has_become_old_is_no_growth(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process can have so many objects that the collections of this test take longer than is allowed.
    monkeypatch.setattr(other_causes, "_COLLECTING", math.inf)
    judge, reports = detector()
    for step in range(steps):
        cycle: list[object] = [bytearray(MIB)]
        cycle.append(cycle)
        gc.collect(1)  # the cycle is in use: it counts as old from now on
        del cycle
        judge.step(step, 500 + step)
    judge.finish()
    assert reports == ([], [], [])


@glibc
def test_what_is_freed_after_the_last_step_was_no_garbage_before() -> None:
    """Before the last judgement, the program's functions have returned: their cycles are garbage now."""
    judge, reports = detector()
    kept: list[object] = []
    kept.append(kept)
    for step in range(120):
        kept.append(bytearray(MIB))
        judge.step(step, 500 + step)
    del kept
    judge.finish()
    assert [found.series for found in reports.confirmed] == ["host.anon"]


@pytest.fixture
def libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None)
    found.malloc.restype = ctypes.c_void_p
    found.free.argtypes = (ctypes.c_void_p,)
    return found


def allocated(libc: ctypes.CDLL, count: int) -> list[tuple[int, int]]:
    """Return blocks of 64 KiB, each with a small block that keeps the heap from shrinking."""
    return [(libc.malloc(64 * 1024), libc.malloc(32)) for _ in range(count)]


def free_some(libc: ctypes.CDLL, blocks: list[tuple[int, int]], step: int) -> None:
    """Free the large blocks of a step, 1 MiB in all. The small ones stay between."""
    for block, _ in blocks[16 * step : 16 * step + 16]:
        libc.free(block)


@glibc
def test_free_lists_of_the_allocator_are_distinguished_from_memory_in_use(
    libc: ctypes.CDLL,
) -> None:
    blocks = allocated(libc, 16 * 600)
    judge, reports = detector()
    for step in range(600):
        free_some(libc, blocks, step)
        judge.step(step, 500 + step)
    for _, small in blocks:
        libc.free(small)
    steps = [found.step for found in reports.confirmed]
    assert {found.series for found in reports.confirmed} == {"host.free_lists"}
    assert all(after - before >= 64 for before, after in pairwise(steps))
    assert len(steps) >= 2


@glibc
@pytest.mark.parametrize("larger_until", [0, 100, 600])
def test_free_memory_that_larger_inputs_leave_is_no_growth(
    libc: ctypes.CDLL, larger_until: int
) -> None:
    """``larger_until``: the last step whose inputs are larger than those before it."""
    blocks = allocated(libc, 16 * 600)
    judge, reports = detector()
    for step in range(600):
        free_some(libc, blocks, step)
        if step % 60 == 0 and step <= larger_until:
            inputs = (TensorInput("x", (8, 64 + step), "float32"),)
            judge(StepInputs(at(step), step, "host", GIB, inputs))
        judge.step(step, 500 + step)
    judge.finish()
    for _, small in blocks:
        libc.free(small)
    assert bool(reports.confirmed) is (larger_until < 600)


@glibc
def test_memory_freed_after_the_last_step_is_no_free_list(libc: ctypes.CDLL) -> None:
    """Before the last judgement, the program's functions have returned and freed their memory."""
    judge, reports = detector()
    blocks = []
    for step in range(120):
        blocks += allocated(libc, 16)
        judge.step(step, 500 + step)
    for block, _ in blocks:
        libc.free(block)
    judge.finish()
    for _, small in blocks:
        libc.free(small)
    assert [found.series for found in reports.confirmed] == ["host.anon"]


@glibc
def test_small_free_pieces_do_not_hide_growth_outside_the_allocator(libc: ctypes.CDLL) -> None:
    """Python's small objects lie outside the heap: of 200 MiB, the allocator has 6 MiB, all of them free."""
    blocks = allocated(libc, 200)
    judge, reports = detector()
    for step in range(200):
        if step >= 80:
            libc.free(blocks[step][0])
        judge.step(step, 500 + step)
    judge.finish()
    for number, (block, small) in enumerate(blocks):
        if number < 80:
            libc.free(block)
        libc.free(small)
    assert [found.series for found in reports.confirmed] == ["host.anon"]


@pytest.mark.parametrize(
    ("free", "low", "high", "expected"),
    [
        (1000.0, 0.9, 1.1, (1009, 1211)),
        (1000.0, 0.4, 1.0, None),
        (None, 0.9, 1.1, None),
        (1e9, 0.9, 1.1, None),
    ],
)
def test_a_forecast_is_an_interval_or_nothing(
    free: float | None, low: float, high: float, expected: tuple[int, int] | None
) -> None:
    assert forecast(Growth(0, 1.0, low, high, 500, 100), free, 100) == expected


@pytest.mark.parametrize(
    ("series", "kind", "where"),
    [
        ("host.anon", "growth", None),
        ("host.free_lists", "allocator_free_lists", None),
        ("shared_memory", "shared_memory", None),
        ("child:DataLoader worker 3", "worker_process", "DataLoader worker 3"),
        ("cuda0.allocated", "growth", "cuda0"),
        ("cuda0.private_pools", "graph_pools", "cuda0"),
    ],
)
def test_the_series_decides_the_kind_of_finding(series: str, kind: str, where: str | None) -> None:
    grown = Suspicion(series, 40, MIB, 0.9 * MIB, 1.1 * MIB, GIB, 4 * GIB, 560, (3000, 3600))
    found = finding_of(grown)
    assert (found.kind, found.where) == (kind, where)
    assert (found.rate, found.since_step, found.forecast) == (MIB, 40, (3000, 3600))
    assert found.title.endswith(" grows")
    assert where is None or where in found.title
    assert found.confidence == "high"


def test_growth_judged_by_few_steps_or_with_a_wide_interval_is_less_certain() -> None:
    wide = Suspicion("host.anon", 40, MIB, 0.5 * MIB, 1.5 * MIB, GIB, None, 160)
    found = [finding_of(wide), finding_of(wide._replace(step=80))]
    assert [one.confidence for one in found] == ["medium", "low"]


def test_heap_fragments_are_found_if_they_grow_long() -> None:
    published: list[Event] = []
    receive = GrowthFindings(published.append)
    growing = Suspicion("host.free_lists", 40, MIB, 0.9 * MIB, 1.1 * MIB, GIB, None, 160)
    for step in (160, 300, 460, 600):
        receive(growing._replace(step=step))
    assert [found.step for found in published if isinstance(found, Finding)] == [460]


@pytest.mark.parametrize(
    ("steps", "fills"), [(90, None), (140, None), (55, 40), (61, 40), (72, 40), (90, 40), (140, 40)]
)
def test_what_a_search_takes_and_leaves_is_no_growth_and_hides_none(
    steps: int, fills: int | None
) -> None:
    newest = 0

    def since_suspicion() -> int:
        return newest - reports.suspected[0].step if reports.suspected else 0

    judge, reports = detector(is_searching=lambda: 0 < since_suspicion() <= 21)
    for newest in range(steps):
        own = 60 if 0 < since_suspicion() < 15 else 21 if since_suspicion() else 0
        judge.step(newest, 500 + min(newest, fills or steps) + own)
    judge.finish()
    assert len(reports.suspected) == 1
    if fills is not None:
        assert reports.confirmed == []
        return
    [confirmed] = reports.confirmed
    assert confirmed.rate == pytest.approx(MIB, rel=0.01)
    assert confirmed.since_step <= 2
    assert confirmed.level == pytest.approx((500 + newest + 21) * MIB, rel=0.01)
