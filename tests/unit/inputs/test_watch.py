"""The watch on the ends of steps: the steps that it records, and its report that steps became larger."""

import random
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.events import Batch, DeviceReading, Event, Finding, StepInputs
from memlog.inputs.watch import StepInputsWatch

MIB = 1024**2


@pytest.fixture(autouse=True)
def _no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off reading of this process's heap, because the memory levels are made up."""
    monkeypatch.setattr("memlog.inputs.watch.read_heap", lambda: None)


class Run:
    """Steps of a training loop. Its memory figures are made up, but its batches are real."""

    def __init__(self, *, device: bool = False) -> None:
        self.published: list[Event] = []
        self.diagnostics = Diagnostics()
        self.watch = StepInputsWatch(self.published.append, self.diagnostics)
        self.device = device
        self.mark = 0
        self.step = 0

    def train(self, steps: Iterable[tuple[int, float]], level: int = 300 * MIB) -> None:
        for length, peak in steps:
            tokens = torch.empty(8, length, dtype=torch.int64, device="meta")
            self.end_step(round(peak), level)
            use(tokens)

    def end_step(self, peak: int, level: int) -> None:
        source = "exact" if peak > self.mark else "watermark"
        self.mark = max(self.mark, peak)
        if self.device:
            reading = DeviceReading("cuda0", level, level, self.mark, source, None)
            self.watch(Batch(0, self.step, MIB, MIB, "watermark", (reading,)))
        else:
            self.watch(Batch(0, self.step, level, self.mark, source))
        self.step += 1

    @property
    def findings(self) -> list[Finding]:
        return [event for event in self.published if isinstance(event, Finding)]

    @property
    def records(self) -> list[StepInputs]:
        return [event for event in self.published if isinstance(event, StepInputs)]


def use(tokens: object) -> None: ...


def needs(length: int) -> float:
    return 300 * MIB + length * MIB


@pytest.mark.parametrize("device", [False, True])
def test_growing_lengths(device: bool) -> None:
    run = Run(device=device)
    run.train((16 + 8 * step, needs(16 + 8 * step)) for step in range(100))
    (early,) = run.findings
    assert early.step is not None
    assert early.step < 60
    assert "the longest so far, " in early.title
    run.watch.finish(99)
    newest = run.findings[-1]
    assert len(run.findings) == 2
    assert newest.step == 99
    longest = run.records[-1].inputs[0].shape[1]
    assert f"{longest:,} at step {run.records[-1].step}, " in newest.title
    assert run.records[-1].step >= 98
    assert newest.where == "dimension 1 of `tokens`"
    assert {record.device for record in run.records} == {"cuda0" if device else "host"}
    assert all(record.inputs[0].shape == (8, 16 + 8 * record.step) for record in run.records)


def test_lengths_that_grew_for_a_while_and_then_vary_have_no_growth_at_the_end() -> None:
    run = Run()
    lengths = [60 + 36 * at for at in range(10)] * 20
    run.train((length, needs(length)) for length in lengths)
    (early,) = run.findings
    assert early.rate is not None
    run.watch.finish(199)
    newest = run.findings[-1]
    assert (newest.kind, newest.where, newest.memory) == (early.kind, early.where, early.memory)
    assert (newest.rate, newest.forecast) == (None, None)
    assert "384 at step 9" in newest.title


def test_inputs_that_are_larger_than_before_are_published_if_the_peak_rises_by_one_percent() -> (
    None
):
    run = Run()
    run.train((64 + 16 * (step // 25), 400 * MIB + 5 * MIB * (step // 25)) for step in range(100))
    assert [record.inputs[0].shape[1] for record in run.records] == [80, 96, 112]
    assert [record.step for record in run.records] == [25, 50, 75]


def test_no_record_of_the_same_inputs_without_a_rise_of_five_percent() -> None:
    run = Run()
    run.train((64, needs(64) + step * MIB) for step in range(100))
    peaks = [record.peak for record in run.records[1:]]  # the first one is there to compare with
    assert peaks
    assert all(after >= 1.05 * before for before, after in pairwise(peaks))
    assert run.findings == []


def test_inputs_that_vary_stand_before_others() -> None:
    run = Run()
    for step in range(20):
        data = torch.empty(1000, 3, device="meta")
        a_batch = torch.empty(8, 16 + 8 * step, dtype=torch.int64, device="meta")
        run.end_step(round(needs(16 + 8 * step)), 300 * MIB)
        use(a_batch)
        use(data)
    assert [each.name for each in run.records[-1].inputs] == ["a_batch", "data"]


def test_random_lengths_are_no_finding() -> None:
    for seed in range(40):
        source = random.Random(seed)  # noqa: S311 - nothing secret
        run = Run()
        lengths = [min(int(source.lognormvariate(5.5, 0.8)) + 8, 2048) for _ in range(400)]
        run.train((length, needs(length)) for length in lengths)
        run.watch.finish(399)
        assert run.findings == [], seed


@pytest.mark.slow
def test_a_leak_beside_random_lengths_is_no_larger_step() -> None:
    for seed in range(20):
        source = random.Random(seed)  # noqa: S311 - nothing secret
        run = Run()
        for step in range(200):
            length, kept = source.randint(16, 400), step * 4 * MIB
            run.train([(length, needs(length) + kept)], 300 * MIB + kept)
        run.watch.finish(199)
        assert run.findings == [], seed


def test_growth_of_lengths_beside_a_leak_is_left_to_the_test_for_growth() -> None:
    run = Run()
    for step in range(100):
        kept = step * 30 * MIB
        run.train([(16 + 8 * step, needs(16 + 8 * step) + kept)], 300 * MIB + kept)
    run.watch.finish(99)
    assert run.findings == []


@pytest.mark.slow
def test_the_number_of_records_is_bounded() -> None:
    run = Run()
    run.train((8, 1.06**step * MIB) for step in range(400))
    assert 150 < len(run.records) <= 200


def test_looks_at_steps_that_are_no_records_keep_to_their_share() -> None:
    run = Run()
    run.watch._begun -= 10 * 10**9  # as if ten seconds had passed: 20 ms for looks
    run.train([(8, needs(8))] * 5_000)
    spent, last = run.watch._spent, run.watch._cost
    assert spent > 0
    assert spent - last <= 0.002 * (time.perf_counter_ns() - run.watch._begun)


def test_a_buffer_that_is_copied_to_grow_is_kept_memory() -> None:
    run = Run()
    for step in range(100):
        size = (16 + 8 * step) * MIB
        run.train([(16 + 8 * step, 300 * MIB + 2 * size)], 300 * MIB + size)
    run.watch.finish(99)
    assert run.findings == []


@pytest.mark.parametrize("level_rises", [True, False])
def test_a_tensor_that_is_copied_to_grow_is_no_input(level_rises: bool) -> None:
    """Not even if the level after the steps seems steady, as beside memory that is freed."""
    run = Run()
    for step in range(100):
        size = (16 + 8 * step) * MIB
        memory = torch.empty(size // 4, device="meta")
        tokens = torch.empty(8, 16, device="meta")
        run.end_step(300 * MIB + 2 * size, 300 * MIB + size * level_rises)
        use(memory)
        use(tokens)
    run.watch.finish(99)
    assert run.findings == []
    assert [[each.name for each in record.inputs] for record in run.records[2:]] == [
        ["tokens"] for _ in run.records[2:]
    ]


def test_a_list_that_gains_a_tensor_each_step_is_no_input() -> None:
    """The names of inputs are those of variables in the functions that call the step, such as this one."""
    run, kept = Run(), []
    for step in range(40):
        kept.append(torch.empty(4, device="meta"))
        tokens = torch.empty(8, 16 + step, device="meta")
        run.end_step(300 * MIB + 30 * MIB * step, 300 * MIB)
        use(tokens)
    assert run.records
    names = {each.name for record in run.records for each in record.inputs}
    assert "tokens" in names
    assert not any(name.startswith("kept[") for name in names)


def test_states_that_are_kept_now_and_then_are_no_inputs() -> None:
    run, best = Run(), list[dict[str, torch.Tensor]]()
    for step in range(60):
        if step % 10 == 9:
            best.append({"weight": torch.empty(32, 32, device="meta")})
        tokens = torch.empty(8, 16, device="meta")
        run.end_step(300 * MIB + 60 * MIB * len(best), 300 * MIB + 60 * MIB * len(best))
        use(tokens)
    assert run.records[-1].step == 59
    assert {each.name for record in run.records for each in record.inputs} == {"tokens"}


def test_a_tensor_that_is_replaced_by_a_longer_one_now_and_then_is_no_input() -> None:
    run, outputs = Run(), None
    for step in range(60):
        if step % 10 == 9:
            rows = 32 if outputs is None else len(outputs) + 32
            outputs = torch.empty(rows, 32, device="meta")
        tokens = torch.empty(8, 16, device="meta")
        run.watch.next_look = 0
        run.end_step(300 * MIB + 60 * MIB * (step // 10), 300 * MIB)
        use(tokens)
    use(outputs)
    assert run.records[-1].step == 50
    sizes = {each for record in run.records for each in record.inputs if each.name == "outputs"}
    # The first one can be an input. It is there at the next look, too, and is none from then on.
    assert len(sizes) <= 1


def test_tensors_that_stay_are_no_inputs_beside_new_ones() -> None:
    run = Run()
    data_set, preview = torch.empty(64, 10), torch.empty(7, 3, device="meta")
    run.train((16, 300 * MIB + step * MIB) for step in range(8))
    run.train([(32, 500 * MIB)])
    assert [each.name for each in run.records[-1].inputs] == ["tokens"]
    use((data_set, preview))


def test_the_same_batch_in_each_step_is_an_input() -> None:
    run = Run()
    whole = torch.empty(64, 10)
    for step in range(8):
        run.end_step(300 * MIB + step * MIB, 300 * MIB)
    run.end_step(500 * MIB, 300 * MIB)
    assert [each.name for each in run.records[-1].inputs] == ["whole"]
    use(whole)
