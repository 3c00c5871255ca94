"""Post-mortem reports, from journals of every kind of end."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt
from support import training
from support.journals import GIB, MIB, MadeRun, at, batch, cuda
from support.postmortems import ADVICE, FAILURE, KILLED, SAMPLE, changed, ended, report_of, trace

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.postmortem import OUT_OF_MEMORY as LIKELY
from memlog.delivery.helper.postmortem import WORKER_KILLED as POSSIBLE
from memlog.delivery.helper.postmortem import _rule, explain_afterwards
from memlog.events import (
    Artifact,
    Batch,
    Device,
    DeviceState,
    DeviceUse,
    Health,
    PinnedMemory,
    Sample,
    Trace,
    TracedLayer,
    TracedLine,
)
from memlog.reports import advice, postmortem
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import report
from memlog.reports.worst_step import Standing
from memlog.trace.encoding import CATEGORIES
from memlog.trace.predict import advise


def test_layers_of_which_nobody_knows_what_they_held_are_left_out(tmp_path: Path) -> None:
    """The sampling engine records no allocations."""
    layers = (TracedLayer("blocks.0", None, 400 * MIB, None, None),)
    sampled = Trace(at(1), 0, "sampler", False, 400 * MIB, {}, layers, None)
    text = report_of(ended(tmp_path, sampled, FAILURE)).text
    assert "held at the peak" not in text
    assert "400.0 MiB" in text


def test_what_no_layer_held_is_named_by_line(tmp_path: Path) -> None:
    lines = (TracedLine("train.py:42 in step: cross_entropy", 100 * MIB),)
    held = msgspec.structs.replace(trace(), lines=lines)
    text = report_of(ended(tmp_path, held, FAILURE)).text
    assert "| `train.py:42 in step: cross_entropy` | 100.0 MiB | 25% |" in text


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_report_is_written_whatever_holds_the_peak(tmp_path: Path, category: str) -> None:
    held = trace(at_peak={category: 400 * MIB})
    text = report_of(ended(tmp_path, held, FAILURE)).text
    assert f"| {category} | 400.0 MiB | 100% |" in text
    if category == "optimizer state":
        assert "The optimizer's state holds 400.0 MiB" in text


def test_every_table_of_the_report_parses_as_markdown(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, trace(), SAMPLE, FAILURE)).text
    found = MarkdownIt().enable("table").parse(text)
    heads = [
        [cell.content for cell in itertools.takewhile(_in_the_head, found[number:]) if cell.content]
        for number, token in enumerate(found)
        if token.type == "table_open"
    ]
    assert heads == [
        ["requested", "free", "in use", "limit"],
        ["what", "bytes", "share"],
        ["layer", "held at the peak", "share"],
        ["step", "process (RSS), peak"],
    ]


def _in_the_head(token: object) -> bool:
    return getattr(token, "type", "") != "thead_close"


def test_a_part_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("optimizer_state")

    for name in ("_holders", "_trend"):
        monkeypatch.setattr(postmortem, name, fails)
    health = Diagnostics()
    text = report(ended(tmp_path, trace(), FAILURE), KILLED, None, health).text
    assert text.count("memlog failed to write this part") == 2
    assert sum(health.faults.values()) == 2
    assert "layer: blocks.0 (Block)" in text
    assert "A higher limit" in text


def test_a_damaged_step_costs_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("memlog.delivery.helper.postmortem.read_worst_step", fails)
    run = MadeRun(tmp_path).write(batch(0, GIB), FAILURE).closed()
    explain_afterwards(run)
    assert "What would help" in (run.artifacts / "postmortem.md").read_text()


def test_free_memory_is_that_of_the_failure(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, FAILURE)).text
    assert "| 400.0 MiB | 100.0 MiB | 924.0 MiB | 1.0 GiB |" in text
    assert "Limit: the limit on the process's address space" in text
    assert "After the failed step's own memory was freed, 500.0 MiB were free" in text


def test_a_limit_that_had_enough_left_is_not_blamed(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, changed(free=GIB))).text
    assert "another limit must have stopped it" in text
    assert "Limit: " not in text
    assert "A higher limit" not in text


def test_a_worker_is_named_and_nothing_of_the_trainers_is_blamed(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("free", "limit", "limited_by", "allocated", "layer", "phase"))
    worker = changed(worker="DataLoader worker process 3", free_after=None, **nothing)
    found = report_of(ended(tmp_path, trace(), SAMPLE, worker))
    assert found.title == (
        "Out of memory in DataLoader worker process 3 after step 29, 400.0 MiB requested"
    )
    assert "a separate process: its free memory and its limit are unknown" in found.text
    assert "num_workers=0" in found.text
    assert "What held the memory" not in found.text
    assert not any(line in found.text for line in ADVICE)


KILLED_WORKER = {
    **dict.fromkeys(
        ("requested", "free", "limit", "limited_by", "allocated", "layer", "phase", "free_after")
    ),
    "worker": "DataLoader worker (pid 4242)",
    "message": "DataLoader worker (pid 4242) is killed by signal: Killed.",
    "signal": "Killed",
}


@pytest.mark.parametrize(
    ("signal", "kills", "cause", "why", "rule"),
    [
        ("Killed", 0, "", "too. During the run the kernel killed no process", POSSIBLE),
        ("Killed", None, "", "too. It is unknown whether the kernel", POSSIBLE),
        ("Killed", 1, " because memory ran out", "the kernel killed a process", LIKELY),
        ("Bus error", 0, " because memory ran out", "`/dev/shm`", LIKELY),
    ],
)
def test_a_killed_worker_is_blamed_on_memory_as_far_as_is_known(
    tmp_path: Path, signal: str, kills: int | None, cause: str, why: str, rule: str
) -> None:
    state = ended(tmp_path, trace(), SAMPLE, changed(**KILLED_WORKER | {"signal": signal}))
    witness = Witness("helper", oom_kills=kills)
    found = report_of(state, witness)
    assert found.title == f"DataLoader worker (pid 4242) was killed{cause} after step 29"
    assert why in found.text
    assert _rule(state, witness) == rule
    assert "num_workers=0" in found.text
    assert ("--shm-size" in found.text) == (signal == "Bus error")
    assert "What held the memory" not in found.text


def test_what_left_the_program_is_named(tmp_path: Path) -> None:
    text = report_of(
        ended(tmp_path, changed(raised_as="RuntimeError: trainer: step 0 failed"))
    ).text
    assert (
        "It led to the error that ended the program: `RuntimeError: trainer: step 0 failed`" in text
    )


@pytest.mark.parametrize("kills", [0, None])
def test_an_end_that_memory_has_no_part_in_gets_no_advice_on_memory(
    tmp_path: Path, kills: int | None
) -> None:
    found = report_of(ended(tmp_path, trace(), SAMPLE), Witness("helper", oom_kills=kills))
    assert found.title == "Ended unexpectedly after step 29"
    assert "Nothing points to memory as the cause" in found.text
    assert "What would help" not in found.text
    assert "What held the memory" not in found.text
    assert (
        "## The newest traced step\n\nIt was step 0 (dispatch), at its peak of 400.0" in found.text
    )
    assert "not what ended this run" in found.text
    assert ("dmesg" in found.text) is (kills is None)
    assert "139 a segmentation fault" in found.text
    assert "std::bad_alloc" in found.text


def test_a_report_without_readings_claims_no_cause(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path), Witness("sync")).text
    assert "memlog knows little about this run's end" in text


@pytest.mark.parametrize(
    ("sample", "witness", "title"),
    [
        (SAMPLE, Witness("helper", 2), "Killed by the kernel because memory ran out after step 29"),
        (
            msgspec.structs.replace(SAMPLE, available=GIB // 100),
            KILLED,
            "Ended unexpectedly after step 29, with little memory left",
        ),
        (
            msgspec.structs.replace(SAMPLE, cgroup_limit=GIB + 10 * MIB),
            Witness("helper"),
            "Ended unexpectedly after step 29, with little memory left",
        ),
    ],
)
def test_where_memory_is_a_plausible_cause_there_is_advice(
    tmp_path: Path, sample: Sample, witness: Witness, title: str
) -> None:
    found = report_of(ended(tmp_path, trace(), sample), witness)
    assert found.title == title
    assert "half the batch" in found.text
    assert "| activations | 400.0 MiB | 100% |" in found.text


def test_a_last_look_at_a_process_that_is_gone_says_nothing(tmp_path: Path) -> None:
    gone = msgspec.structs.replace(SAMPLE, tree_pss=None, available=21 * GIB)
    text = report_of(ended(tmp_path, SAMPLE, gone)).text
    assert "(at step 28), the process and its descendants held 1.0 GiB" in text
    assert "unknown" not in text


def test_the_traced_steps_meaning_for_the_failed_one_is_explained(tmp_path: Path) -> None:
    alike = report_of(ended(tmp_path / "alike", trace(7), FAILURE)).text
    assert "newest traced step, step 7 (dispatch), at its peak of 400.0 MiB" in alike
    assert "came 23 steps later. It was not traced, and may have been different" in alike
    larger = report_of(ended(tmp_path / "larger", trace(7, peak=10 * MIB), FAILURE)).text
    assert "was not traced, and needed far more: 400.0 MiB were requested there" in larger
    itself = report_of(ended(tmp_path / "itself", trace(None), FAILURE)).text
    assert "It was running when the run ended" in itself


def test_what_was_asked_for_outside_the_model_gets_no_advice_on_the_model(tmp_path: Path) -> None:
    numpys = changed(
        requested=8 * GIB,
        layer=None,
        phase=None,
        message="Unable to allocate 8.00 GiB for an array",
    )
    text = report_of(ended(tmp_path, trace(), FAILURE, numpys)).text
    assert "The request was made outside the model's layers" in text
    assert "The failed request was made outside the model's layers" in text
    assert "half the batch" not in text


def test_no_smaller_batch_is_advised_if_the_optimizer_finds_no_room(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, trace(), changed(layer=None, phase="optimizer"))).text
    assert "It happened in the optimizer's step" in text
    assert "Adam keeps two numbers for each parameter" in text
    assert "half the batch" not in text


def test_a_killed_run_of_few_tensors_is_advised_to_look_elsewhere(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, trace(peak=10 * MIB), SAMPLE), Witness("helper", 1)).text
    assert "only 10.0 MiB" in text
    assert "half the batch" not in text


def test_the_flame_graph_is_named_where_there_is_one(tmp_path: Path) -> None:
    graph = Artifact(at(2), "worst-step.speedscope.json.gz", "flamegraph", "artifacts/w", 9)
    text = report_of(ended(tmp_path / "with", trace(), graph, FAILURE)).text
    assert "`worst-step.speedscope.json.gz`" in text
    assert f"`memlog open k7m2xq9a --dir {tmp_path / 'with'}`" in text
    assert "`memlog pull ID --backend mlflow -o out`" in text
    assert "memlog open" not in report_of(ended(tmp_path / "without", trace(), FAILURE)).text
    wordless = report_of(ended(tmp_path / "wordless", trace(), graph)).text
    assert "`worst-step.speedscope.json.gz`" in wordless
    assert f"`memlog open k7m2xq9a --dir {tmp_path / 'wordless'}`" in wordless
    untraced = report_of(ended(tmp_path / "untraced")).text
    assert "newest traced step" not in untraced


def test_why_no_step_was_traced_is_told_in_place_of_how_to_trace(tmp_path: Path) -> None:
    waits = Health(at(2), 0, 0.5, 100.0, {}, {}, untraced="it allows that after 60 s")
    text = report_of(ended(tmp_path, waits, FAILURE)).text
    assert "so the layers' shares are unknown: it allows that after 60 s." in text
    assert "layers=True" not in text


def predicted() -> advice.Prediction:
    case = training.CASES["gpt"]
    return advice.Prediction(advise(training.traced(case)), 0, Standing(1, None, None))


def test_what_grew_is_named_for_a_larger_step(tmp_path: Path) -> None:
    """A lighter optimizer saves half of a small step, and nothing of one whose batch is huge."""
    worst = predicted()
    assert any(hint.kind == "optimizer" for hint in worst.advice.hints)
    small = trace(peak=10 * MIB, at_peak={"optimizer state": 6 * MIB, "activations": 4 * MIB})
    text = report(ended(tmp_path / "larger", small, FAILURE), KILLED, worst).text
    helps = text.partition("## What would help")[2]
    assert "400.0 MiB requested, 10.0 MiB at the traced peak): its forward pass grew" in helps
    assert "A smaller batch, or shorter or smaller inputs" in helps
    assert "`torch.utils.checkpoint` (on `blocks.0`, `blocks.1`, `blocks.2`)" in helps
    assert "SGD" not in helps
    assert "8 bits" not in helps
    assert "%) less" not in helps
    helps = report_of(ended(tmp_path / "small", small, FAILURE)).text.partition("## What would")[2]
    assert "A smaller batch" in helps
    assert "SGD" not in helps
    alike = report(ended(tmp_path / "alike", trace(), FAILURE), KILLED, worst).text
    assert "SGD without momentum" in alike
    assert "%) less" in alike


def test_before_the_first_step_no_layers_are_named(tmp_path: Path) -> None:
    loading = changed(layer=None, phase=None, resident=900 * MIB)
    text = report_of(ended(tmp_path, loading, steps=0)).text
    assert "No step was complete, so the layers' shares are unknown." in text
    assert "It held 900.0 MiB. The error's traceback shows where." in text
    assert "layers=True" not in text
    first = report_of(ended(tmp_path / "first", FAILURE, steps=0)).text
    assert "It failed in the first step, and no step was traced" in first


def test_a_process_peak_that_is_only_bounded_is_shown_as_a_bound(tmp_path: Path) -> None:
    steps = [
        Batch(at(0), 0, 400 * MIB, 500 * MIB, "watermark"),
        Batch(at(1), 1, 400 * MIB, 600 * MIB, "exact"),
    ]
    text = report_of(final_state(MadeRun(tmp_path).write(*steps, FAILURE).closed())).text
    assert "| step | process (RSS), peak |" in text
    assert "| 0 | 400.0 MiB, at most 500.0 MiB |" in text
    assert "| 1 | 400.0 MiB, 600.0 MiB |" in text


def test_a_request_that_no_machine_has_room_for_is_called_that(tmp_path: Path) -> None:
    huge = changed(requested=16 * 1024 * GIB, machine=24 * GIB)
    text = report_of(ended(tmp_path, trace(), huge)).text
    helps = text.partition("## What would help")[2]
    assert "16.0 TiB were requested in one piece, and the whole machine has 24.0 GiB" in helps
    assert "or a shape is wrong" in helps
    assert "higher limit" not in text
    assert not any(line in text for line in ADVICE)
    gpus = changed(device="cuda0", requested=GIB, limit=GIB // 2, machine=None)
    assert "the whole cuda0 has 512.0 MiB" in report_of(ended(tmp_path / "gpu", gpus)).text


def test_the_rest_of_a_limit_is_no_room(tmp_path: Path) -> None:
    """A request of 64 KiB failed with 4 MiB free: the allocator requests more at once."""
    text = report_of(ended(tmp_path, changed(requested=64 * 1024, free=4 * MIB))).text
    assert "Limit: the limit on the process's address space" in text
    assert "another limit must have stopped it" not in text


def pinned(mebibytes: int) -> PinnedMemory:
    return PinnedMemory(at(30), 28, mebibytes * MIB, MIB, mebibytes * MIB, "exact")


def test_pinned_memory_is_shown_beside_the_hosts_and_advised_on(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, pinned(256), FAILURE)).text
    assert "PyTorch held 256.0 MiB as page-locked (pinned) memory (1.0 MiB in use)." in text
    assert "- 256.0 MiB are pinned memory. PyTorch rounds a block" in text


@pytest.mark.parametrize(("mebibytes", "shown", "advised"), [(30, True, False), (5, False, False)])
def test_little_pinned_memory_is_no_advice(
    tmp_path: Path, mebibytes: int, shown: bool, advised: bool
) -> None:
    text = report_of(ended(tmp_path, pinned(mebibytes), FAILURE)).text
    assert ("(pinned) memory (" in text, "are pinned memory" in text) == (shown, advised)


def test_pinned_memory_is_no_advice_if_a_device_is_full(tmp_path: Path) -> None:
    text = report_of(ended(tmp_path, pinned(256), changed(device="cuda0"))).text
    assert "are pinned memory" not in text


@pytest.mark.parametrize("shares_host", [True, False])
def test_memory_of_a_device_that_shares_the_hosts_counts_as_the_runs(
    tmp_path: Path, shares_host: bool
) -> None:
    run = MadeRun(tmp_path)
    run.write(Device(at(0), "cuda0", "GB10", 120 * GIB, shares_host=shares_host))
    run.write(*(batch(step, GIB, cuda(100 * GIB)) for step in range(30)))
    run.write(msgspec.structs.replace(SAMPLE, available=3 * GIB))
    title = report_of(final_state(run.closed())).title
    assert ("with little memory left" in title) == shares_host


def test_what_the_host_holds_matters_to_a_device_that_shares_its_memory(tmp_path: Path) -> None:
    state = DeviceState(free=100 * MIB, shares_host=True)
    full = changed(device="cuda0", state=state, limit=120 * GIB, machine=120 * GIB, reserved=GIB)
    text = report_of(ended(tmp_path, SAMPLE, pinned(256), full)).text
    assert "cuda0 shares the host's memory: `free` is what the machine could still give." in text
    assert "of which the process and its descendants held 1.0 GiB" in text
    assert "- 256.0 MiB are pinned memory." in text


@pytest.mark.parametrize(
    ("others", "outside", "said"),
    [
        (
            30 * GIB,
            33 * GIB,
            "the memory of other processes on cuda0 grew from 1.0 GiB at step 2 to 30.0 GiB.",
        ),
        (4 * GIB, 33 * GIB, None),
        (
            None,
            33 * GIB,
            "the memory outside PyTorch's allocator of this process on cuda0 grew from 3.0 GiB at step 2 to "
            "33.0 GiB.",
        ),
        (None, 6 * GIB, None),
    ],
)
def test_what_other_processes_took_during_the_run_is_told(
    tmp_path: Path, others: int | None, outside: int, said: str | None
) -> None:
    run = MadeRun(tmp_path)
    run.write(*(batch(step, GIB, cuda(5 * GIB)) for step in range(30)))
    for step, size in ((1, 2 * GIB), (2, GIB), (3, 9 * GIB)):
        use = DeviceUse("cuda0", 40 * GIB, size + 2 * GIB, size)
        run.write(msgspec.structs.replace(SAMPLE, step=step, devices=(use,)))
    state = DeviceState(free=GIB, outside=outside, others=others)
    full = changed(device="cuda0", state=state, limit=80 * GIB, machine=80 * GIB, reserved=11 * GIB)
    text = report_of(final_state(run.write(full).closed())).text
    assert ("During the run, " in text) == (said is not None)
    if said is not None:
        assert f"During the run, {said} PyTorch's allocator of this process held 10.0 GiB" in text
        assert "after the first step and 11.0 GiB at the failure." in text
