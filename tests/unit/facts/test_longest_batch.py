"""The memory of the longest batch: its range contains the truth, or nothing is said."""

import random
from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, Device, DeviceReading, Event, Finding, PeaksBySize, SampleLengths
from memlog.facts.judge import RunJudge
from memlog.facts.later_memory import LongestBatch, longest_batch
from memlog.facts.levels import Peak
from memlog.facts.run_fold import RunFold

MIB = 1024**2
GIB = 1024**3
DEVICE = Device(0, "cuda0", "GPU", 16 * GIB)


def lengths(longest: int, tail: tuple[int, ...] = (), *, is_random: bool = True) -> SampleLengths:
    return SampleLengths("`lengths` of Sampler", longest, 1000, tail, is_random, takes_all=True)


def by_size(
    sizes: Iterable[int],
    peak: Callable[[int], float],
    known: SampleLengths | None,
    *,
    device: str = "cuda0",
    noise: float = 0.0,
    seed: int = 0,
    grows: bool = False,
) -> PeaksBySize:
    source = random.Random(seed)  # noqa: S311 - nothing secret
    points = tuple((size, round(peak(size) + source.gauss(0, noise))) for size in sorted(sizes))
    return PeaksBySize(
        time_us=0,
        step=499,
        device=device,
        name="tokens",
        dimension=1,
        is_length=True,
        points=points,
        largest=points[-1][0],
        steps=500,
        batch=8,
        grows=grows,
        lengths=known,
    )


def told(found: PeaksBySize, host_limit: int | None = None) -> LongestBatch | None:
    return longest_batch(found, {}, {"cuda0": DEVICE}, host_limit)


def line(size: int) -> float:
    return 2 * GIB + 6 * MIB * size


def parabola(size: int) -> float:
    return 2 * GIB + 1 * MIB * size + 3000 * size**2


def required(found: LongestBatch | None) -> LongestBatch:
    assert found is not None
    return found


SIZES = (128, 256, 384, 512, 640)


def test_a_batch_that_is_more_than_the_device_has() -> None:
    found = required(told(by_size(SIZES, lambda size: line(size) * 1.3, lengths(2048))))
    assert found.text == (
        "A batch of length 2,048 (the longest sample of the data set, if none is cut or left out) will need "
        "about 18.2 GiB on cuda0: that is more than its 16.0 GiB."
    )
    assert (found.fits, found.source, found.seen) == (False, "data set", 640)
    assert found.evidence[-1] == "the longest sample's length is from `lengths` of Sampler"


def test_a_batch_that_fits_and_one_that_may() -> None:
    fits = required(told(by_size(SIZES, line, lengths(1024))))
    assert fits.text.endswith("will need about 8.0 GiB on cuda0: that fits into its 16.0 GiB.")
    unsure = required(told(by_size(SIZES, line, lengths(2304))))
    assert (unsure.fits, "may not fit into its 16.0 GiB" in unsure.text) == (None, True)


def test_five_bucket_sizes_suffice_but_four_do_not() -> None:
    assert told(by_size(SIZES, parabola, lengths(1280))) is not None
    assert told(by_size(SIZES[:4], parabola, lengths(1280))) is None


@pytest.mark.parametrize("truth", [line, parabola])
def test_the_range_contains_the_truth(truth: Callable[[int], float]) -> None:
    said = inside = 0
    for seed in range(200):
        source = random.Random(seed)  # noqa: S311 - nothing secret
        sizes = source.sample(range(100, 900), source.randint(5, 12))
        longest = source.randint(900, 1800)
        found = told(by_size(sizes, truth, lengths(longest), noise=4 * MIB, seed=seed))
        if found is not None:
            said += 1
            high = found.high_bytes
            inside += found.low_bytes <= truth(longest) and (high is None or truth(longest) <= high)
    assert said > 120
    assert inside >= 0.95 * said


def test_a_line_and_a_parabola_that_can_not_be_told_apart_give_one_range() -> None:
    found = required(told(by_size((300, 400, 500, 600, 700), line, lengths(1200), noise=8 * MIB)))
    assert "a line and a parabola" in found.evidence[0]
    assert (found.high_bytes or 0) - found.low_bytes > 0.2 * GIB
    assert " GiB to " in found.text


@pytest.mark.parametrize("truth", [line, parabola])
def test_far_beyond_the_sizes_seen_only_a_lower_bound_is_told(
    truth: Callable[[int], float],
) -> None:
    found = required(told(by_size((500, 510, 520, 530, 540), truth, lengths(1400), noise=MIB)))
    assert (found.high_bytes, found.low_bytes <= truth(1400)) == (None, True)
    assert " will need at least " in found.text
    assert found.fits is not True


def test_nothing_is_said_if_no_curve_fits() -> None:
    assert (
        told(by_size(SIZES, lambda size: line(size) + 300 * MIB * (size == 384), lengths(999)))
        is None
    )


def test_small_inputs_whose_peak_is_elsewhere_do_not_count() -> None:
    sizes = range(100, 1100, 100)
    found = required(told(by_size(sizes, lambda size: max(line(size), line(350)), lengths(1500))))
    assert found.low_bytes <= line(1500) <= (found.high_bytes or 0)
    assert found.evidence[0].startswith("the peaks of 7 sizes from 400 to 1,000 differ from a line")


def test_the_longest_is_padded_like_the_others() -> None:
    assert required(told(by_size(SIZES, line, lengths(1025)))).size == 1152
    assert required(told(by_size((129, 256, 384, 512, 640), line, lengths(1025)))).size == 1025


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(lengths(4000, (1200, 2000, 3000)), id="letters, not tokens"),
        pytest.param(lengths(4000, (200, 300, 400, 500, 700, 1000)), id="truncated later"),
        pytest.param(lengths(500, (100,)), id="of another data set"),
        pytest.param(None, id="unknown"),
    ],
)
def test_lengths_that_contradict_the_batches_do_not_count(known: SampleLengths | None) -> None:
    found = required(told(by_size(SIZES, line, known)))
    assert (found.source, found.size) == ("seen", 640)
    assert found.text == (
        "A batch of length 640, the largest seen, needed 5.8 GiB on cuda0; the data set's longest sample is "
        "unknown."
    )


def test_longer_samples_can_still_come() -> None:
    rare = lengths(1500, (200, 300, 400, 500, 550, 580, 600, 610, 700))
    assert required(told(by_size(SIZES, line, rare))).source == "seen"  # 4,000 samples had a chance
    similar = lengths(1500, (200, 300, 400, 500, 550, 580, 600, 610, 620, 700), is_random=False)
    assert required(told(by_size(SIZES, line, similar))).size == 1536
    by_length = lengths(4000, (1200, 2000, 3000), is_random=False)
    assert told(by_size(range(200, 1200, 10), line, by_length, grows=True)) is not None


def test_the_longest_sample_was_seen() -> None:
    found = required(told(by_size(SIZES, line, lengths(640))))
    assert found.text == (
        "A batch of length 640 (the longest sample of the data set) needed 5.8 GiB on cuda0."
    )


def test_the_process_and_the_memory_beside_it() -> None:
    found = required(told(by_size(SIZES, line, lengths(2048), device="host"), 8 * GIB))
    assert found.text.endswith("in the process: that is more than the process's 8.0 GiB.")


def judged(*events: Event) -> tuple[list[Finding], RunFold]:
    published: list[Event] = []
    judge = RunJudge(published.append, lambda _: None, lambda: None, Diagnostics())
    for event in events:
        judge.take(event)
    return [event for event in published if isinstance(event, Finding)], judge.facts


def test_too_large_a_batch_is_a_finding_until_it_is_known_better() -> None:
    large = by_size(SIZES, lambda size: line(size) * 1.3, lengths(2048))
    reading = DeviceReading("cuda0", GIB, GIB, GIB, "exact", None)
    step = Batch(0, 499, MIB, MIB, "watermark", (reading,))
    (finding,), facts = judged(DEVICE, step, large, large)
    assert (finding.kind, finding.where) == ("longest_batch", "dimension 1 of `tokens`")
    assert [each.kind for each in facts.findings("running")] == ["longest_batch"]
    facts.take(finding)
    assert len(facts.findings("running")) == 1
    facts.take(by_size(SIZES, line, lengths(1024)))
    assert facts.findings("running") == []
    assert judged(DEVICE, step, by_size(SIZES, line, lengths(1024)))[0] == []


SMALL_MODEL = (
    (88, 65.4), (93, 67.5), (105, 71.8), (123, 78.9), (124, 79.2), (126, 79.9), (127, 80.3),
    (129, 83.5), (130, 83.8), (134, 85.3), (140, 89.0), (143, 89.7), (145, 90.7), (147, 92.1), (153, 93.9),
    (154, 94.6), (160, 96.4), (162, 97.3), (164, 97.8), (166, 98.2), (170, 101.1), (171, 101.3),
    (175, 102.3), (177, 103.7), (181, 104.6),
    (183, 105.1), (187, 107.0), (196, 111.2), (206, 114.9), (223, 121.1), (227, 123.3), (265, 142.3),
)  # fmt: skip
"""Sizes, and MiB at the peak, of a small encoder whose memory is a line but for what the allocator rounds."""


def small_model(longest: int, known: SampleLengths | None = None) -> LongestBatch:
    peaks = {size: peak * MIB for size, peak in SMALL_MODEL}
    found = by_size(peaks, peaks.__getitem__, known or lengths(longest))
    return required(longest_batch(found, {}, {"cuda0": Device(0, "cuda0", "GPU", 500 * MIB)}, None))


def test_rounding_is_no_curve() -> None:
    """Real batches of 1,000 and 1,500 needed 442 and 645 MiB."""
    assert 400 * MIB < small_model(1000).low_bytes < 443 * MIB
    assert 560 * MIB < small_model(1500).low_bytes < 650 * MIB


def test_nothing_is_told_about_a_batch_many_times_as_long_as_all_others() -> None:
    peaks = {size: peak * MIB for size, peak in SMALL_MODEL}
    assert told(by_size(peaks, peaks.__getitem__, lengths(2500))) is None


def test_a_batch_is_too_large_only_if_its_tensors_are() -> None:
    """The allocator gives back what it holds beside tensors before an allocation fails."""
    found = by_size(SIZES, line, lengths(2048))
    held = {
        f"cuda0.{kind}": Peak(bytes=size, source="sampled", step=3, evaluation=None)
        for kind, size in (("reserved", 8 * GIB), ("allocated", 5 * GIB))
    }
    assert required(longest_batch(found, held, {"cuda0": DEVICE}, None)).fits is None
    assert required(longest_batch(found, {}, {"cuda0": DEVICE}, None)).fits is True


def test_samples_that_a_sampler_of_the_program_may_leave_out_are_no_finding() -> None:
    assert small_model(1500).fits is False
    of_program = replace(lengths(1500), takes_all=False)
    found = small_model(1500, of_program)
    assert found.fits is None
    assert "if none is cut or left out" in found.text
    maximum = replace(of_program, samples=0, source="the collator's `max_length`")
    assert small_model(1500, maximum).fits is None


def test_a_lower_bound_far_below_the_limit_is_not_compared_with_it() -> None:
    peaks = {size: peak * MIB for size, peak in SMALL_MODEL}
    text = required(told(by_size(peaks, peaks.__getitem__, lengths(1500)))).text
    assert "at least" in text
    assert "may not fit" not in text
