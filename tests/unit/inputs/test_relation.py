"""A dimension of an input is named only if the steps' peaks follow it."""

import random
from collections.abc import Callable, Iterable

import pytest

from memlog.events import TensorInput
from memlog.inputs.relation import Relation, StepPeak, larger_steps, matters, relation

MIB = 1024**2
BASE = 300 * MIB


def numbers(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - nothing secret


def tokens(batch: int, length: int, name: str = "tokens") -> TensorInput:
    return TensorInput(name, (batch, length), "int64")


def marked(steps: Iterable[tuple[tuple[TensorInput, ...], float]]) -> list[StepPeak]:
    """Steps as seen through an allocator's high-water mark: only a peak above all earlier ones is known."""
    found: list[StepPeak] = []
    mark = 0
    for step, (inputs, peak) in enumerate(steps):
        rose = peak > mark
        mark = max(mark, round(peak))
        found.append(StepPeak(step, inputs, mark, rose, BASE))
    return found


def of_lengths(
    lengths: Iterable[int], peak: Callable[[int], float], noise: float = 0.0, seed: int = 0
) -> list[StepPeak]:
    source = numbers(seed)
    return marked(
        ((tokens(8, length),), BASE + peak(length) + source.gauss(0, noise)) for length in lengths
    )


def required(found: Relation | None) -> Relation:
    assert found is not None
    return found


def title(found: Relation) -> str:
    return larger_steps(found, 9, found.peak).title


def test_a_linear_relation_is_named_with_its_slope() -> None:
    found = required(relation(of_lengths(range(64, 1025, 32), lambda length: 0.9 * MIB * length)))
    assert (found.name, found.dimension, found.is_length) == ("tokens", 1, True)
    assert (found.largest, found.step, found.is_linear) == (1024, 30, True)
    assert found.slope == pytest.approx(0.9 * MIB, rel=0.01)
    finding = larger_steps(found, 30, found.peak)
    assert finding.title == (
        "The peak follows the sequence length (dimension 1 of `tokens`): 921.6 KiB per token; the longest, "
        "1,024 at step 30, reached the peak"
    )
    assert finding.where == "dimension 1 of `tokens`"
    assert matters(found)


def test_a_step_that_was_not_looked_at_may_have_been_larger() -> None:
    found = required(relation(of_lengths(range(64, 1025, 32), lambda length: 0.9 * MIB * length)))
    text = larger_steps(found, 40, found.peak + 10 * MIB).title
    assert text.endswith(
        "the longest that memlog looked at, 1,024 at step 30, came within 1% of the peak"
    )


def test_a_quadratic_relation_is_not_called_linear() -> None:
    found = required(relation(of_lengths(range(64, 1025, 32), lambda length: 1000 * length**2)))
    assert not found.is_linear
    assert found.slope == pytest.approx(2000 * 1024, rel=0.01)
    assert "faster than in proportion" in larger_steps(found, 30, found.peak).title


def test_small_inputs_that_all_need_the_same() -> None:
    steps = of_lengths(range(16, 1025, 16), lambda n: max(1000 * n**2, 30 * MIB + n))
    assert not required(relation(steps)).is_linear


def test_noise_of_a_few_percent() -> None:
    lengths = range(64, 1025, 16)
    for seed in range(20):
        steps = of_lengths(lengths, lambda length: 0.5 * MIB * length, 8 * MIB, seed)
        assert required(relation(steps)).slope == pytest.approx(0.5 * MIB, rel=0.1)


def test_random_lengths_follow_too_but_steps_that_are_no_record_must_not_contradict() -> None:
    lengths = numbers(3).choices(range(64, 1025), k=2000)
    steps = of_lengths(lengths, lambda length: 0.5 * MIB * length)
    assert sum(step.known for step in steps) >= 6
    assert required(relation(steps)).largest == max(lengths)
    # A later step as long as the longest needed far less.
    longest = StepPeak(5000, (tokens(8, 3000),), steps[-1].peak, known=False, after=BASE)
    assert relation([*steps, longest]) is None


def test_peaks_that_have_nothing_to_do_with_the_lengths() -> None:
    for seed in range(200):
        source = numbers(seed)
        lengths = [source.randint(64, 1024) for _ in range(60)]
        steps = marked(
            ((tokens(8, length),), BASE + step * 8 * MIB) for step, length in enumerate(lengths)
        )
        assert relation(steps) is None
        peaks = [BASE + source.random() * 500 * MIB for _ in lengths]
        assert (
            relation(marked(((tokens(8, n),), p) for n, p in zip(lengths, peaks, strict=True)))
            is None
        )


def test_labels_that_vary_with_the_tokens_are_the_same_dimension() -> None:
    steps = marked(
        (
            (
                TensorInput("mask", (8, 1, length, length), "float32"),
                tokens(8, length - 1, "labels"),
                tokens(8, length),
            ),
            BASE + MIB * length,
        )
        for length in range(32, 512, 16)
    )
    found = required(relation(steps))
    assert (found.name, found.dimension) == ("labels", 1)


def test_of_two_dimensions_the_one_that_explains() -> None:
    source = numbers(1)
    steps = marked(
        ((tokens(source.randint(1, 64), length),), BASE + MIB * length)
        for length in range(32, 512, 16)
    )
    assert required(relation(steps)).dimension == 1


def test_of_two_dimensions_neither_explains_their_product() -> None:
    source = numbers(1)
    sizes = [(source.randint(1, 64), source.randint(16, 512)) for _ in range(3000)]
    steps = marked(((tokens(*size),), BASE + 10_000 * size[0] * size[1]) for size in sizes)
    assert sum(step.known for step in steps) >= 6
    assert relation(steps) is None


def test_dimensions_that_grow_together_are_not_distinguished() -> None:
    steps = marked(
        (
            (tokens(8, length), TensorInput("x", (length + step % 2, 3), "float32")),
            BASE + MIB * length,
        )
        for step, length in enumerate(range(32, 512, 16))
    )
    assert relation(steps) is None


def test_fewer_than_five_values() -> None:
    steps = of_lengths([100, 200, 300, 400], lambda length: MIB * length)
    assert relation(steps) is None
    assert relation(of_lengths([100, 100, 200, 300, 400, 500, 600], lambda n: MIB * n)) is not None


def test_memory_that_stays_is_no_larger_step() -> None:
    steps = of_lengths(range(64, 1025, 32), lambda length: MIB * length)
    kept = [step._replace(after=step.peak - 40 * MIB) for step in steps]
    assert relation(kept) is None


def test_one_far_longer_input_is_named_only_if_the_others_predict_it() -> None:
    lengths = [*range(64, 128, 8), 1024]
    assert required(relation(of_lengths(lengths, lambda n: 0.5 * MIB * n))).largest == 1024

    def flat_then_high(length: int) -> float:
        return 0.5 * MIB * length if length < 1000 else 2000 * MIB

    assert relation(of_lengths(lengths, flat_then_high)) is None


def test_other_inputs_have_no_sequence_length() -> None:
    steps = marked(
        ((TensorInput("x", (8, size), "float32"),), BASE + MIB * size)
        for size in range(64, 512, 16)
    )
    assert title(required(relation(steps))).startswith(
        "The peak follows dimension 1 of `x`: 1.0 MiB per unit; the largest, 496 at step 27,"
    )
    steps = marked(
        ((TensorInput("x", (size, 3), "float32"),), BASE + MIB * size)
        for size in range(64, 512, 16)
    )
    assert title(required(relation(steps))).startswith(
        "The peak follows dimension 0 of `x` (usually the batch size): 1.0 MiB"
    )


def test_a_small_rise_does_not_matter() -> None:
    assert not matters(
        required(relation(of_lengths(range(64, 1025, 32), lambda n: 0.05 * MIB * n)))
    )
    higher = of_lengths(range(960, 1200, 8), lambda n: MIB * n)  # a quarter more
    assert not matters(required(relation(higher)))


def test_lengths_that_rise_from_step_to_step_have_a_rate_and_a_forecast() -> None:
    found = required(relation(of_lengths(range(64, 1025, 32), lambda length: 0.9 * MIB * length)))
    finding = larger_steps(found, 30, found.peak, free=round(28.8 * MIB) * 100)
    assert finding.rate == pytest.approx(32 * 0.9 * MIB, rel=0.01)
    assert (finding.since_step, finding.forecast) == (0, (130, 131))
    assert finding.limit == found.peak + round(28.8 * MIB) * 100


def test_no_forecast_far_beyond_the_lengths_so_far_or_from_a_parabola() -> None:
    line = required(relation(of_lengths(range(64, 1025, 32), lambda length: 0.9 * MIB * length)))
    assert larger_steps(line, 30, line.peak, free=100 * line.peak).forecast is None
    curve = required(relation(of_lengths(range(64, 1025, 32), lambda length: 1000 * length**2)))
    finding = larger_steps(curve, 30, curve.peak, free=curve.peak)
    assert finding.forecast is None
    assert finding.rate == pytest.approx(32 * 2000 * 1024, rel=0.02)


def test_lengths_that_also_fall_have_no_rate() -> None:
    source = numbers(1)
    lengths = [200 + 16 * step + source.randrange(-90, 90) for step in range(60)]
    found = required(relation(of_lengths(lengths, lambda length: 0.9 * MIB * length)))
    finding = larger_steps(found, 60, found.peak, free=found.peak)
    assert (finding.rate, finding.forecast, finding.since_step) == (None, None, None)


def test_an_input_that_no_longer_grows_has_no_rate() -> None:
    found = required(relation(of_lengths(range(64, 1025, 32), lambda length: 0.9 * MIB * length)))
    finding = larger_steps(found, 400, found.peak, free=round(28.8 * MIB) * 100)
    assert (finding.rate, finding.forecast) == (None, None)
