"""Post-mortem reports of runs whose memory grew: what grew, and whether it was kept."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from support.journals import GIB, MIB, MadeRun, at, batch, cuda
from support.postmortems import changed, ended, report_of, trace

from memlog.events import Batch, Event, PeakSource, Sample
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness


def grown(root: Path, sizes: Iterable[int], *events: Event, files: Sequence[int] = ()) -> str:
    """Return the advice after steps with these levels in MiB; `files`: pages of files at each tenth step."""
    run = MadeRun(root).write(*(batch(n, size * MIB) for n, size in enumerate(sizes)), *events)
    run.sampled(
        *(
            Sample(at(n), 10 * n, GIB, 1, 20 * GIB, None, None, size * MIB)
            for n, size in enumerate(files)
        )
    )
    text = report_of(final_state(run.closed()), Witness("helper", 1)).text
    return text.partition("## What would help")[2]


LEAK = [400 + 10 * n for n in range(60)]
KEPT = changed(free=2 * MIB, free_after=6 * MIB)


def test_growth_that_nothing_gave_back_is_kept(tmp_path: Path) -> None:
    text = grown(tmp_path, LEAK, KEPT)
    assert "grew throughout, by 590.0 MiB over the last 59 steps: something keeps" in text
    assert "`loss.detach()`" in text
    assert "A higher limit only lets it fail later" in text
    assert "half the batch" not in text


def test_growth_that_came_free_again_is_not_kept(tmp_path: Path) -> None:
    """Batches grow. The memory of the failed step was freed when the step failed."""
    text = grown(tmp_path, LEAK, changed(free=0, free_after=443 * MIB))
    assert "something keeps" not in text
    assert (
        "allocates and frees grew by 443.0 MiB, and 443.0 MiB were freed with the failed step's own memory"
        in text
    )


def test_what_the_allocator_holds_unused_is_not_kept(tmp_path: Path) -> None:
    """Batches grow, in blocks that the C library does not return to the system."""
    unused = msgspec.structs.replace(KEPT, idle=400 * MIB)
    text = grown(tmp_path / "unused", LEAK, unused)
    assert "grew by 590.0 MiB over the last 59 steps, but at the end nothing used 400.0 MiB" in text
    assert "something keeps" not in text
    assert "only lets it fail later" not in text
    assert "The place of the failure is chance" not in text
    some = msgspec.structs.replace(KEPT, idle=200 * MIB)
    text = grown(tmp_path / "some", LEAK, some)
    assert (
        "(at the end nothing used 200.0 MiB of it): either something keeps memory of each step"
        in text
    )
    little = msgspec.structs.replace(KEPT, idle=100 * MIB)
    assert ": something keeps memory of each step" in grown(tmp_path / "little", LEAK, little)


def test_what_nothing_uses_is_compared_with_all_growth_not_with_the_last_steps(
    tmp_path: Path,
) -> None:
    """Blocks become unused during the whole run, but the report covers only the last 200 steps."""
    long = [400 + 2 * n for n in range(600)]
    some = msgspec.structs.replace(KEPT, idle=210 * MIB)
    text = grown(tmp_path / "kept", long, some)
    assert "nothing used 210.0 MiB of it): either something keeps memory of each" in text
    assert "only lets it fail later" in text
    most = msgspec.structs.replace(KEPT, idle=700 * MIB)
    text = grown(tmp_path / "unused", long, most)
    assert "something keeps" not in text
    assert "likely the steps became larger" in text


def test_a_leak_beside_steps_that_need_much_is_kept(tmp_path: Path) -> None:
    """The failed step freed as much as every step needs."""
    run = MadeRun(tmp_path)
    for step, size in enumerate(LEAK):
        run.write(Batch(at(step), step, size * MIB, (size + 440) * MIB, "exact"))
    run.write(changed(free=0, free_after=443 * MIB))
    text = report_of(final_state(run.closed())).text
    assert "something keeps memory of each step" in text
    assert "became larger" not in text


def test_pages_of_files_are_not_kept(tmp_path: Path) -> None:
    text = grown(tmp_path, LEAK, KEPT, files=[10, 110, 210, 310, 410, 510])
    assert "something keeps" not in text
    assert "at least 500.0 MiB of that are pages of mapped files" in text
    assert "something keeps" in grown(tmp_path / "few", LEAK, KEPT, files=[10, 20, 30, 40, 50, 60])


@pytest.mark.parametrize(
    "sizes",
    [
        [400 + 12 * (n % 20) for n in range(60)],
        [400] * 10 + [1000] * 50,
        [min(400 + 40 * n, 1000) for n in range(60)],
        [400 + n // 10 for n in range(60)],
    ],
    ids=["sawtooth", "jump", "cache that filled", "little"],
)
def test_what_does_not_keep_growing_is_no_leak(tmp_path: Path, sizes: list[int]) -> None:
    assert "grew" not in grown(tmp_path, sizes, KEPT)


def test_where_it_is_not_known_what_a_step_needs_both_causes_are_named(tmp_path: Path) -> None:
    steps = [Batch(at(n), n, size * MIB, GIB, "watermark") for n, size in enumerate(LEAK)]
    text = report_of(final_state(MadeRun(tmp_path).write(*steps, KEPT).closed())).text
    assert "either something keeps memory of each step, or the steps became larg" in text


def test_growth_that_ran_into_the_limit_and_stayed_there_is_found(tmp_path: Path) -> None:
    """C code goes on after a failed allocation, until another request fails."""
    assert "something keeps" in grown(tmp_path, [*LEAK, *[LEAK[-1]] * 60], KEPT)


def test_a_devices_growth_is_that_of_the_device(tmp_path: Path) -> None:
    steps = [batch(n, GIB, cuda((1 + n) * 100 * MIB)) for n in range(30)]
    run = MadeRun(tmp_path).write(*steps, changed(device="cuda0", free=0, free_after=None))
    assert "The memory on cuda0 grew throughout" in report_of(final_state(run.closed())).text


def test_a_last_straw_is_not_the_cause(tmp_path: Path) -> None:
    """A C library took all memory; the optimizer made the next request."""
    straw = changed(
        free=2 * MIB, free_after=6 * MIB, requested=386 * 1024, phase="optimizer", layer=None
    )
    run = MadeRun(tmp_path).write(*(batch(n, size * MIB) for n, size in enumerate(LEAK)), straw)
    text = report_of(final_state(run.closed())).text
    assert (
        "The request that failed was made in the optimizer's step, layer: unknown. The phase in which"
        in text
    )
    assert "The place of the failure is chance: the request was for 386.0 KiB" in text
    assert "It failed in the optimizer's step" not in text
    assert "Adam" not in text


def larger_steps(root: Path, *peaks: int, resident: int | None = None, **failure: object) -> str:
    """Return the advice after steps with these peaks in MiB, each with 400 MiB in use at its end."""
    run, mark = MadeRun(root), 0
    for step, peak in enumerate(peaks):
        source: PeakSource = "exact" if step and peak > mark else "watermark"
        mark = max(mark, peak)
        run.write(Batch(at(step), step, 400 * MIB, mark * MIB, source))
    highest = None if resident is None else resident * MIB
    lost = changed(free=0, free_after=MIB, resident=highest, **failure)
    text = report_of(final_state(run.write(trace(), lost).closed())).text
    return text.partition("## What would help")[2]


@pytest.mark.parametrize(
    "peaks",
    [
        [400 + 10 * 2**n for n in range(7)],
        [400 + 60 * n for n in range(11)],
        [400 + 10 * 2 ** (n // 3) for n in range(30)],
        [400 + 10 * n + 15 * (n % 3) for n in range(60)],
    ],
    ids=["doubles", "few steps", "doubles every third", "not each one larger"],
)
def test_batches_that_grow_are_the_cause_in_few_steps_too(tmp_path: Path, peaks: list[int]) -> None:
    text = larger_steps(tmp_path, *peaks, resident=peaks[-1] + 100)
    assert f"of the last {len(peaks)} steps peaked higher than every one before" in text
    assert f"(step {peaks.index(max(peaks))}). So the steps became larger" in text
    assert "something keeps" not in text


def test_steps_of_random_size_did_not_grow(tmp_path: Path) -> None:
    """The largest batch fails; an occasional new maximum is chance."""
    chance = random.Random(0)  # noqa: S311 - no secret
    named = 0
    for number in range(100):
        peaks = [400 + round(chance.expovariate(0.01)) for _ in range(chance.randint(6, 60))]
        named += "peaked higher" in larger_steps(tmp_path / str(number), *peaks)
    assert named <= 2


def test_steps_that_grew_and_then_no_more_are_not_the_cause(tmp_path: Path) -> None:
    assert "peaked higher" not in larger_steps(tmp_path, *range(410, 900, 40), *[800] * 40)


def test_growth_over_few_steps_is_reported_without_a_cause(tmp_path: Path) -> None:
    steps = [400 + 60 * n for n in range(12)]
    text = grown(tmp_path, steps, changed(free=2 * MIB, free_after=6 * MIB, requested=60 * MIB))
    assert "rose by 660.0 MiB over the run's 12 steps, too few to find the cause" in text
    assert (
        "The place of the failure may be chance: the request was for 60.0 MiB, after growth by 660.0 MiB"
        in text
    )
    assert "is the cause" not in text
    assert "half the batch" not in text
    assert "rose by" not in larger_steps(tmp_path / "warm", 400, 450, 460, resident=900)


def test_steps_that_were_not_recorded_are_not_left_out_of_the_count(tmp_path: Path) -> None:
    """With `every`, the journal has only some of the steps."""
    run = MadeRun(tmp_path / "kept").write(
        *(batch(10 * n, (400 + 60 * n) * MIB) for n in range(12))
    )
    text = report_of(final_state(run.write(changed(free=2 * MIB, requested=MIB)).closed())).text
    assert "over the 12 recorded steps, too few" in text
    assert "To find the cause, record 20 steps or more, for example with a smaller `every`" in text
    run = MadeRun(tmp_path / "larger")
    for n in range(12):
        run.write(Batch(at(n), 10 * n, 400 * MIB, (410 + 60 * n) * MIB, "exact"))
    text = report_of(final_state(run.write(changed(free=0, free_after=MIB)).closed())).text
    assert "12 of the last 12 recorded steps peaked higher than every one before" in text


def test_a_jump_after_the_last_step_is_no_trait_of_the_steps(tmp_path: Path) -> None:
    """An evaluation keeps its graphs; the failed request was small."""
    text = larger_steps(tmp_path, *[440] * 10, resident=1200, requested=2 * MIB)
    assert (
        "grew by 800.0 MiB after step 9; no earlier step's peak was more than 40.0 MiB above"
        in text
    )
    assert (
        "The place of the failure is chance: the request was for 2.0 MiB, after growth by 800.0 MiB"
        in text
    )
    assert "half the batch" not in text
    text = larger_steps(tmp_path / "flat", *[400] * 10, resident=1200, requested=2 * MIB)
    assert "no earlier step's peak was above the memory in use at its end. So" in text
    assert "parameters that are trained for the first time" in text
    assert "after step" not in larger_steps(tmp_path / "usual", *[440] * 10, resident=470)
    assert "after step" not in larger_steps(tmp_path / "before", *[900] * 10, resident=900)


def test_growth_over_few_steps_of_a_run_that_jumped_before_it_was_killed(tmp_path: Path) -> None:
    """The last sample is far above the level after the steps."""
    state = ended(tmp_path, Sample(at(11), 9, 3 * GIB, 1, 20 * GIB, None, None), steps=0)
    state.steps = [batch(n, (400 + 6 * n) * MIB) for n in range(10)]
    assert "rose by" not in report_of(state, Witness("helper", 1)).text
    state.samples = []
    assert "rose by 54.0 MiB over the run's 10 steps" in report_of(state, Witness("helper", 1)).text


def test_a_devices_steps_are_those_of_the_device(tmp_path: Path) -> None:
    lost = changed(device="cuda0", free=0, free_after=None, requested=MIB, allocated=900 * MIB)
    steps = [batch(n, GIB, cuda(100 * MIB, (110 + 70 * n) * MIB)) for n in range(10)]
    text = report_of(final_state(MadeRun(tmp_path / "grow").write(*steps, lost).closed())).text
    assert "The memory that was freed after a step's peak grew from" in text
    steps = [batch(n, GIB, cuda(100 * MIB, 130 * MIB)) for n in range(10)]
    text = report_of(final_state(MadeRun(tmp_path / "jump").write(*steps, lost).closed())).text
    assert "The memory on cuda0 grew by 800.0 MiB after step 9; no earlier step's peak" in text


def test_a_step_that_held_far_more_was_not_like_the_traced_one(tmp_path: Path) -> None:
    few = changed(requested=MIB, resident=3 * GIB)
    assert (
        "was not traced, and 2.0 GiB more were in use there"
        in report_of(ended(tmp_path, trace(), few)).text
    )


def test_pythons_own_error_at_the_limit_is_a_last_straw(tmp_path: Path) -> None:
    unsaid = changed(requested=None, free=MIB, free_after=MIB, phase=None, layer=None)
    assert "is chance: nearly nothing was free" in grown(tmp_path, LEAK, unsaid)
