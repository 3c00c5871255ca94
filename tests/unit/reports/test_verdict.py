"""The verdict on a run: the most important finding, or that nothing grew."""

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from support.journals import GIB, MIB, MadeRun, at, batch, cuda

from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import (
    POSTMORTEM_FILE,
    Batch,
    ChildReading,
    Device,
    End,
    Evaluation,
    Finding,
    HeapReading,
    Inquiry,
    OutOfMemory,
    Sample,
    StepInputs,
    TensorInput,
)
from memlog.facts.run_fold import RunFold
from memlog.facts.run_verdict import RunVerdict
from memlog.facts.verdict import verdict as judge
from memlog.findings import ranked
from memlog.reports import summarize
from memlog.reports.figures import run_figures
from memlog.reports.live import LiveRun

KEPT = Finding(
    time_us=at(30),
    step=30,
    kind="kept_graph",
    title="`history`, a list in `__main__` (train.py:31), gains one tensor per step",
    where="history",
    since_step=12,
    rate=34 * MIB,
    forecast=(640, 700),
    limit=24 * GIB,
    evidence=("Each keeps the graph of its step alive.",),
    confidence="high",
    remedy="Append `loss.item()` or `loss.detach()`.",
)


def other(kind: str, *, rate: float | None, forecast: tuple[int, int] | None = None) -> Finding:
    return Finding(at(31), 31, kind, kind, kind, 12, rate, forecast, None)


def sample(step: int, limit: int) -> Sample:
    return Sample(at(step), step, GIB, 1, GIB, GIB, None, host_limit=limit)


def verdict(tmp_path: Path, *events: object, finished: bool = True) -> str:
    run = MadeRun(tmp_path).write(*events)
    if finished:
        run.write(End(at(9_000), "finished"))
    return summarize(run.closed()).verdict


def steps(levels: list[int]) -> list[Batch]:
    return [batch(step, level) for step, level in enumerate(levels)]


def test_a_healthy_run_says_so_in_one_line(tmp_path: Path) -> None:
    levels = [GIB // 2] * 12 + [GIB] * 88
    assert verdict(tmp_path, *steps(levels), sample(9, 24 * GIB)) == (
        "No growth: peak 1.0 GiB of 24.0 GiB, steady since step 12 (88 steps: a rise of more than 4.0 MiB is "
        "excluded)."
    )


@pytest.mark.parametrize(("counts", "says"), [((4, 6, 9), "Unsure: 9 child"), ((4, 8, 8), "No")])
def test_processes_that_pile_up_are_not_called_steady(
    tmp_path: Path, counts: tuple[int, ...], says: str
) -> None:
    def with_children(step: int, count: int) -> Sample:
        names = [f"DataLoader worker {number}" for number in range(count)]
        read = tuple(ChildReading(name, 9, n, 9 * MIB, 9 * MIB) for n, name in enumerate(names))
        return replace(sample(step, GIB), children=read)

    samples = [with_children(30 * n, count) for n, count in enumerate(counts)]
    assert verdict(tmp_path, *steps([GIB] * 70), *samples).startswith(says)


@pytest.mark.parametrize("count", [100, 5_000])
def test_garbage_that_comes_and_goes_is_steady(tmp_path: Path, count: int) -> None:
    levels = [GIB + step % 5 * 100 * MIB for step in range(count)]
    assert verdict(tmp_path, *steps(levels)).startswith("No growth: ")


@pytest.mark.parametrize("count", [60, 5_000])
def test_growth_within_the_tolerance_is_not_called_steady(tmp_path: Path, count: int) -> None:
    levels = [GIB + 8 * MIB * step // count for step in range(count)]
    assert verdict(tmp_path, *steps(levels)).startswith("Unsure: memory rose by ")


def test_growth_that_has_rested_for_a_while_is_not_called_steady(tmp_path: Path) -> None:
    levels = [GIB + 4 * MIB * min(step, 88) for step in range(100)]
    assert verdict(tmp_path, *steps(levels)).startswith("Unsure: memory rose by ")


@pytest.mark.parametrize("at", [5, 30])
def test_a_small_jump_is_steady(tmp_path: Path, at: int) -> None:
    levels = [GIB + 4 * MIB * (step >= at) for step in range(60)]
    assert verdict(tmp_path, *steps(levels)).startswith("No growth: ")


def test_without_steps_it_says_so(tmp_path: Path) -> None:
    evaluations = [Evaluation(at(call), call, 0.5, GIB) for call in range(100)]
    assert verdict(tmp_path, *evaluations) == "Without steps, growth is not judged: peak 1.0 GiB."


def test_nothing_is_claimed_of_too_few_steps(tmp_path: Path) -> None:
    assert (
        verdict(tmp_path, *steps([GIB] * 4)) == "Too few steps to judge growth (4): peak 1.0 GiB."
    )


def test_levels_that_rise_are_not_called_steady(tmp_path: Path) -> None:
    levels = [GIB + step * 20 * MIB for step in range(100)]
    assert verdict(tmp_path, *steps(levels)) == (
        "Unsure: memory rose by 1.9 GiB in 100 steps, and the cause was not searched: peak 2.9 GiB."
    )


def test_what_a_search_suspects_is_told_although_growth_is_not_confirmed(tmp_path: Path) -> None:
    levels = [GIB + step * 20 * MIB for step in range(100)]
    suspect = Inquiry(at(31), 31, "host.anon", searching=False, suspects=(KEPT,))
    assert verdict(tmp_path, *steps(levels), suspect) == (
        "Unsure: memory rose by 1.9 GiB in 100 steps: peak 2.9 GiB. Possible cause: `history`, a list in "
        "`__main__` (train.py:31), gains one tensor per step."
    )


@pytest.mark.parametrize("takes", [False, True])
def test_a_buffer_that_fills_is_told(tmp_path: Path, *, takes: bool) -> None:
    """``takes``: the process takes address space for its growth."""
    levels = [GIB + step * 20 * MIB for step in range(100)]
    spaces = [4 * GIB + takes * step * 20 * MIB for step in range(100)]
    events = [
        replace(event, rss_anon=event.rss, spaces=(space, None))
        for event, space in zip(steps(levels), spaces, strict=True)
    ]
    text = verdict(tmp_path, *events)
    assert text.startswith("Unsure: memory rose by 1.9 GiB in 100 steps")
    assert ("as when a buffer fills" in text) is not takes


@pytest.mark.parametrize("judge", [False, True])
@pytest.mark.parametrize(("largest", "is_late"), [(10, False), (80, True)])
def test_larger_inputs_explain_a_rise_only_if_they_came_late(
    largest: int, *, is_late: bool, judge: bool
) -> None:
    """``judge``: the fold tests for growth itself; in the helper process, another one does."""
    facts = RunFold(judge=judge)
    for step in range(100):
        facts.take(batch(step, GIB + step * 20 * MIB))
        if step in (1, largest):
            tokens = TensorInput("tokens", (8, step), "int64")
            facts.take(StepInputs(at(step), step, "host", GIB, (tokens,)))
    assert facts.have_inputs_grown() is is_late


def test_a_tensor_that_was_not_there_before_is_no_larger_input() -> None:
    facts = RunFold()
    tokens, state = (
        TensorInput("tokens", (8, 64), "int64"),
        TensorInput("best[1]", (9, 99), "float32"),
    )
    for step, inputs in ((1, (tokens,)), (80, (tokens, state))):
        facts.take(batch(step, GIB + step * 20 * MIB))
        facts.take(StepInputs(at(step), step, "host", GIB, inputs))
    assert not facts.have_inputs_grown()


@pytest.mark.parametrize("kib", [20, 2000])
def test_a_suspect_whose_growth_is_not_excluded_leaves_no_all_clear(
    tmp_path: Path, kib: int
) -> None:
    """``kib``: what the suspect gains per step. 4 MiB in 100 steps are not excluded."""
    suspect = replace(KEPT, rate=kib * 1024.0, forecast=None)
    inquiry = Inquiry(at(60), 60, "host.anon", False, (suspect,))
    events = sorted([*steps([GIB] * 100), inquiry], key=lambda event: event.time_us)
    text = verdict(tmp_path, *events)
    if kib == 20:
        assert text.startswith(
            "Unsure: memory is steady since step 0, but a rise of less than 4.0 MiB in 100"
        )
        assert "Possible cause: `history`, a list in" in text
    else:
        assert text.startswith("No growth")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_leak_inside_memory_that_was_freed_before_is_not_called_steady(
    tmp_path: Path, *, keeps: bool
) -> None:
    heaps = [
        HeapReading(at(step), step, 300 * MIB + keeps * step * MIB // 10, MIB)
        for step in (0, 16, 40, 76, 130, 211, 332)
    ]
    events = sorted([*steps([GIB] * 400), *heaps], key=lambda event: event.time_us)
    text = verdict(tmp_path, *events)
    if keeps:
        assert text.startswith(
            "Unsure: memory is steady, but what the program has allocated rose by 25.6 MiB in 256 steps, "
            "inside memory that it had freed before"
        )
    else:
        assert text.startswith("No growth")


@pytest.mark.parametrize("rise", [40, 200])
@pytest.mark.parametrize("last", [1, 2, 4])
def test_a_jump_in_the_last_steps_is_not_called_steady(
    tmp_path: Path, rise: int, last: int
) -> None:
    levels = [GIB + rise * MIB * (step >= 100 - last) for step in range(100)]
    assert verdict(tmp_path, *steps(levels)).startswith("Unsure: memory rose by ")


@pytest.mark.parametrize(
    ("finished", "forecast"), [(True, "would have run out"), (False, "runs out")]
)
def test_a_finding_is_the_verdict(tmp_path: Path, finished: bool, forecast: str) -> None:
    run = MadeRun(tmp_path, alive=not finished).write(*steps([GIB] * 40), KEPT)
    if finished:
        run.write(End(at(9_000), "finished"))
    assert summarize(run.closed()).verdict == (
        "`history`, a list in `__main__` (train.py:31), gains one tensor per step. Memory grows by 34.0 MiB "
        f"a step since step 12, and memory {forecast} at step 640 to 700 (24.0 GiB)."
    )


def test_a_run_that_the_user_interrupted_has_not_ended_unexpectedly(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(*steps([GIB] * 1_500), End(at(9_000), "killed")).closed()
    assert summarize(run).verdict.startswith("Interrupted after step 1,499. No growth: ")


def test_memory_in_use_at_a_failed_allocation_counts_as_the_peak(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(*(batch(step, GIB, cuda(2 * GIB)) for step in range(40)))
    made.write(failure("cuda0", allocated=7 * GIB), End(at(60), "failed"))
    run = made.closed()
    summary, figures = summarize(run), run_figures(run).figures
    assert "peak 7.0 GiB of 24.0 GiB" in summary.verdict
    peak = summary.peaks["cuda0.allocated"]
    assert (peak.bytes, peak.source, peak.step) == (7 * GIB, "sampled", 39)
    assert figures["device.peak"] == 7 * GIB
    assert figures["device.allocated"] == 2 * GIB


def test_the_processs_highest_memory_at_a_failed_allocation_counts_as_the_peak(
    tmp_path: Path,
) -> None:
    made = MadeRun(tmp_path).write(*steps([GIB] * 40))
    run = made.write(failure("host", resident=3 * GIB), End(at(60), "failed")).closed()
    assert summarize(run).peaks["host.rss"].bytes == 3 * GIB
    assert run_figures(run).figures["host.rss"] == 3 * GIB


def failure(
    device: str, *, allocated: int | None = None, resident: int | None = None
) -> OutOfMemory:
    sizes = (2 * GIB, 0, 24 * GIB, None, allocated, allocated, None, None)
    return OutOfMemory(at(50), 39, device, *sizes, "no memory", resident=resident)


def test_a_run_lasts_until_its_last_event_and_not_until_a_later_report(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(*steps([GIB] * 40)).closed()
    explain_afterwards(run)
    assert summarize(run).run.duration_s == pytest.approx(3.9)
    live = LiveRun(run)
    live.update()
    assert live.state([]).elapsed_s == pytest.approx(3.9)


def test_how_the_run_ended_comes_first(tmp_path: Path) -> None:
    unknown = (None,) * 5
    failure = OutOfMemory(at(50), 39, "host", 2 * GIB, 0, 24 * GIB, *unknown, "MemoryError")
    run = MadeRun(tmp_path).write(*steps([GIB] * 40), KEPT, failure, End(at(60), "failed")).closed()
    text = summarize(run).verdict
    assert text.startswith(
        "Out of memory on the host after step 39, 2.0 GiB requested. `history`, a list"
    )
    explain_afterwards(run)
    written = (run.artifacts / POSTMORTEM_FILE).read_text("utf-8").splitlines()
    title, told = written[0].removeprefix("# "), written[2].strip("*")
    assert summarize(run).verdict == f"{title}. {told}"
    assert any("Append `loss.item()`" in line for line in written[3:8])


def test_a_post_mortem_tells_past_growth_as_past(tmp_path: Path) -> None:
    grown = replace(KEPT, memory="host", since_step=0, rate=32 * MIB)
    levels = [GIB + min(step, 30) * 32 * MIB for step in range(120)]
    run = MadeRun(tmp_path).write(*steps(levels), grown).closed()
    explain_afterwards(run)
    told = (run.artifacts / POSTMORTEM_FILE).read_text("utf-8").splitlines()[2].strip("*")
    assert "Memory grew by 32.0 MiB a step from step 0 to" in told
    assert summarize(run).verdict.endswith(told)


def test_the_device_with_the_highest_peak_is_told(tmp_path: Path) -> None:
    both = [
        batch(step, 90 * GIB, cuda(GIB), cuda(30 * GIB, 40 * GIB, index=1)) for step in range(40)
    ]
    devices = [Device(at(0), f"cuda{n}", "NVIDIA H100 80GB HBM3", 80 * GIB) for n in range(2)]
    run = MadeRun(tmp_path).write(*devices, *both, End(at(60), "finished")).closed()
    assert summarize(run).verdict.startswith(
        "No growth: peak 40.0 GiB of 80.0 GiB on cuda1, steady"
    )


def test_what_reaches_its_limit_first_comes_first() -> None:
    slow, fast = other("kept_tensors", rate=MIB), other("worker_process", rate=9 * MIB)
    unknown = other("growth", rate=99 * MIB)
    gradients = other("unowned_gradients", rate=None)
    soon = other("shared_memory", rate=1, forecast=(50, 60))
    assert [one.kind for one in ranked([gradients, slow, unknown, fast, soon, slow])] == [
        "shared_memory",
        "worker_process",
        "kept_tensors",
        "growth",
        "unowned_gradients",
    ]


def test_few_recorded_steps_tell_that_memory_rose(tmp_path: Path) -> None:
    levels = [batch(step, GIB + step * 4 * MIB) for step in range(0, 60, 10)]
    run = MadeRun(tmp_path).write(*levels).closed()
    explain_afterwards(run)
    told = (
        "Too few recorded steps to judge growth (6 of 51): memory rose by 200.0 MiB, peak 1.2 GiB."
    )
    assert summarize(run).verdict == f"Ended unexpectedly after step 50. {told}"
    text = (run.artifacts / "postmortem.md").read_text("utf-8")
    assert told in text
    assert "Nothing points to memory" not in text


@pytest.mark.parametrize("alive", [True, False])
def test_growth_that_has_ended_is_no_growth(tmp_path: Path, alive: bool) -> None:
    """A cache is full after two fifths of the run."""
    sizes = [GIB + 4 * MIB * min(step, 280) for step in range(700)]
    made = MadeRun(tmp_path, alive=alive)
    for step, size in enumerate(sizes):
        made.write(Batch(at(step / 10), step, size, size, "exact", (), size))
    summary = summarize(made.closed())
    assert (summary.outcome, summary.findings) == ("steady", [])


def test_growth_that_ended_after_it_was_found_is_told_as_past(tmp_path: Path) -> None:
    grows = [GIB + step * 3 * MIB for step in range(96)]
    found = replace(KEPT, time_us=at(90), step=90, since_step=3, rate=3.0 * MIB, memory="host")
    ended = [*steps([*grows, *[grows[-1]] * 300]), found]
    assert verdict(tmp_path / "ended", *ended).startswith(
        "`history`, a list in `__main__` (train.py:31), gains one tensor per step. Memory grew by 3.0 MiB a "
        "step from step 3 to 94, and was steady after that."
    )
    going_on = [*steps([GIB + step * 3 * MIB for step in range(396)]), found]
    assert "Memory grows by 3.0 MiB a step since step 3" in verdict(tmp_path / "on", *going_on)


def of_curve(
    rises: list[float],
    *,
    kind: str = "kept_tensors",
    rate: float,
    noise: int = 1,
    since: int = 3,
    rank: int | None = None,
) -> RunVerdict:
    """Return the verdict on memory that rises by MiB as given, with a finding of step 60. Noise in MiB."""
    vary, facts = Random(len(rises)), RunFold(judge=False)  # noqa: S311 - no secret
    for step, risen in enumerate(rises):
        facts.take(batch(step, GIB + int((risen + noise * vary.random()) * MIB)))
        if step == 60:
            found = replace(KEPT, kind=kind, since_step=since, rate=rate * MIB, memory="host")
            facts.take(replace(found, rank=rank))
    facts.take(End(at(9_000), "finished"))
    return judge(facts, "finished")


@pytest.mark.parametrize("mib", [0.6, 20])
@pytest.mark.parametrize(("count", "full"), [(200, 100), (450, 295), (2_000, 1_000)])
def test_a_cache_that_is_full_for_the_last_third_is_no_finding(
    count: int, full: int, mib: float
) -> None:
    told = of_curve([mib * min(step, full) for step in range(count)], rate=mib)
    assert told.outcome == "steady"
    assert told.finding is None
    assert told.text.startswith("No growth: peak ")
    assert (
        "is excluded). Earlier growth has ended, as when a cache is full: `history`, a list in `__main__` "
        "(train.py:31), gains one tensor per step. Memory grew by "
    ) in told.text


@pytest.mark.parametrize("epochs", [4, 10])
def test_growth_that_ends_as_the_last_epoch_begins_stays_a_finding(epochs: int) -> None:
    told = of_curve([min(step, 100 * (epochs - 1)) for step in range(100 * epochs)], rate=1)
    assert told.outcome == "finding"
    assert ("and was steady after that" in told.text) is (epochs == 4)


@pytest.mark.parametrize("period", [16, 50, 150])
def test_the_time_between_two_evaluations_is_not_the_end_of_a_leak(period: int) -> None:
    for count in range(2 * period + 61, 8 * period, period // 3):
        for first in (0, period):
            sizes = [95 * max((step - first) // period + 1, 0) for step in range(count)]
            assert of_curve(sizes, rate=95 / period).outcome == "finding", (count, first)


@pytest.mark.parametrize(("grows", "rests"), [(50, 50), (50, 300), (200, 100)])
def test_a_pause_in_a_leak_is_not_its_end(grows: int, rests: int) -> None:
    both = grows + rests
    for count in range(both + 100, 5 * both, 41):
        sizes = [2 * (step // both * grows + min(step % both, grows)) for step in range(count)]
        assert of_curve(sizes, rate=2 * grows / both).outcome == "finding", count


def test_a_slower_rise_after_the_growth_is_not_its_end() -> None:
    sizes = [3 * min(step, 200) + 0.05 * max(step - 200, 0) for step in range(500)]
    assert of_curve(sizes, rate=3).outcome == "finding"


@pytest.mark.parametrize("kind", ["kept_graph", "hooks_pile_up"])
def test_a_fault_that_is_never_a_cache_stays_a_finding(kind: str) -> None:
    sizes = [min(step, 100) for step in range(400)]
    assert of_curve(sizes, rate=1).outcome == "steady"
    assert of_curve(sizes, rate=1, kind=kind).outcome == "finding"


def test_this_ranks_levels_tell_nothing_about_another_ranks_growth() -> None:
    told = of_curve([min(step, 100) for step in range(400)], rate=1, rank=3)
    assert told.outcome == "finding"
    assert "Memory grows by" in told.text


def test_growth_that_ended_long_ago_stays_a_finding_if_the_run_was_killed(tmp_path: Path) -> None:
    found = replace(KEPT, kind="kept_tensors", memory="host", since_step=0, rate=32.0 * MIB)
    levels = [GIB + min(step, 90) * 32 * MIB for step in range(400)]
    run = MadeRun(tmp_path).write(*steps(levels), found).closed()
    assert summarize(run).outcome == "finding"


def test_two_holders_that_are_filled_at_one_line_are_both_told() -> None:
    targets = replace(KEPT, title="`targets` gains one tensor per step.", rate=640.0 * 1024)
    outputs = replace(KEPT, title="`outputs` gains one tensor per step.", rate=160.0 * 1024)
    earlier = replace(targets, title="`targets` gains 9 tensors every 9 steps.", step=12)
    assert ranked([earlier, targets, outputs]) == [targets, outputs]


def test_a_holder_in_two_memories_is_told_where_memory_runs_out_first() -> None:
    device = replace(KEPT, memory="cuda0", rate=4.0 * MIB, forecast=(504, 510))
    host = replace(KEPT, memory="host", rate=200.0 * 1024, forecast=(114_533, 114_649), step=200)
    newer = replace(device, step=300, forecast=(502, 503))
    assert ranked([device, host]) == [device]
    assert ranked([device, newer, host]) == [newer]
