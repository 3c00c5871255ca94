"""The cause of a failed allocation on a device: named if the figures show it, otherwise not."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.journals import GIB, MIB, MadeRun, at, batch
from support.postmortems import report_of, trace

from memlog.events import (
    Batch,
    DeviceProcess,
    DeviceReading,
    DeviceState,
    End,
    Finding,
    GraphInUse,
    HeldTensors,
    OutOfMemory,
)
from memlog.facts import oom_room
from memlog.facts.oom_cause import Background, cause_of
from memlog.reports import summarize
from memlog.reports.final_state import final_state

FAILURE = OutOfMemory(
    at(40), 29, "cuda0", 400 * MIB, 100 * MIB, 8 * GIB, "the device's memory", 7 * GIB, 7 * GIB + 900 * MIB,
    None, None, "CUDA out of memory", machine=8 * GIB, state=DeviceState(free=100 * MIB),
)  # fmt: skip
OTHER = DeviceProcess(4321, 3 * GIB, "python")
CHILD = replace(OTHER, is_child=True)
KEPT = Finding(
    at(30),
    30,
    "kept_graph",
    "`history` grows. Each keeps its graph",
    "history",
    12,
    34 * MIB,
    None,
    None,
)


def failed(state: DeviceState | None = None, **fields: object) -> OutOfMemory:
    return replace(FAILURE, state=state or FAILURE.state, **fields)


def cause(failure: OutOfMemory, before: Background | None = None) -> tuple[str | None, str]:
    found = cause_of(failure, before or Background())
    return (None, "") if found is None else (found.kind, found.clause)


def test_other_processes_are_named_if_the_request_would_have_fitted_without_them() -> None:
    state = DeviceState(free=100 * MIB, others=3 * GIB, processes=(OTHER,))
    assert cause(failed(state)) == (
        "other processes",
        "another process, `python` (pid 4321), holds 3.0 GiB of the device's 8.0 GiB",
    )
    of_child = cause(failed(replace(state, processes=(CHILD,))))[1]
    assert of_child.startswith("a child process, `python`")
    rank = replace(OTHER, is_rank=True)
    of_rank = failed(replace(state, processes=(rank,)))
    assert cause(of_rank)[1].startswith("another rank of this training, `python` (pid 4321), holds")
    explained = cause_of(of_rank, Background())
    assert explained is not None
    assert oom_room.OWN_DEVICE in explained.remedies
    assert oom_room.END_OTHERS not in explained.remedies
    two = replace(state, processes=(OTHER, OTHER))
    assert cause(failed(two))[1] == "2 other processes hold 3.0 GiB of the device's 8.0 GiB"
    assert cause(failed(state, requested=4 * GIB))[0] != "other processes"
    assert cause(failed(replace(state, others=500 * MIB)))[0] != "other processes"


def test_memory_outside_the_allocator_is_no_process_that_the_driver_does_not_tell() -> None:
    unknown = DeviceState(free=100 * MIB, outside=3 * GIB)
    kind, clause = cause(failed(unknown))
    assert kind == "other processes"
    assert clause == (
        "3.0 GiB of the device's 8.0 GiB are in use outside PyTorch's allocator of this process"
    )
    context = replace(unknown, outside=700 * MIB)
    assert cause(failed(context, reserved=7 * GIB)) == (None, "")


FRACTION = DeviceState(free=6 * GIB, allowed=2 * GIB)
MIDDLE = failed(FRACTION, limit=2 * GIB, reserved=1800 * MIB, allocated=1800 * MIB, free=248 * MIB)


def test_a_fraction_is_the_cause_if_it_alone_stopped_the_request() -> None:
    assert cause(MIDDLE) == (
        "fraction",
        "this process may use only 2.0 GiB of the device's 8.0 GiB (memory fraction)",
    )
    others = replace(FRACTION, others=3 * GIB, processes=(OTHER,))
    assert cause(replace(MIDDLE, state=others)) == cause(MIDDLE)
    nearly_all = replace(FRACTION, allowed=7 * GIB)
    beside_it = replace(
        MIDDLE, state=nearly_all, limit=7 * GIB, reserved=6900 * MIB, allocated=6900 * MIB
    )
    assert cause(beside_it) == (None, "")


def test_a_fraction_and_a_process_are_the_cause_if_both_stopped_the_request() -> None:
    both = DeviceState(free=100 * MIB, allowed=2 * GIB, others=6 * GIB, processes=(OTHER,))
    found = cause_of(replace(MIDDLE, state=both))
    assert found is not None
    assert found.clause == (
        "this process may use only 2.0 GiB of the device's 8.0 GiB (memory fraction), and another process, "
        "`python` (pid 4321), holds 6.0 GiB of the device's 8.0 GiB"
    )
    assert found.remedies[0] == oom_room.BOTH
    # The device's limit is the tighter one, but a free device would not help.
    tighter = replace(MIDDLE, state=replace(both, free=MIB), limit=8 * GIB, free=MIB)
    assert cause(tighter)[1] == found.clause
    too_large = replace(MIDDLE, state=both, requested=7 * GIB)
    assert cause(too_large) == (None, "")


def test_causes_that_each_suffice_are_all_named() -> None:
    state = DeviceState(free=100 * MIB, others=3 * GIB, processes=(OTHER,), largest_unused=20 * MIB)
    found = cause_of(failed(state, reserved=4 * GIB, allocated=2 * GIB))
    assert found is not None
    assert found.kind == "other processes"
    assert "; also, fragmentation, 2.0 GiB are free" in found.clause
    assert len(found.remedies) == 2


@pytest.mark.parametrize(
    "failure",
    [
        failed(allocated=7 * GIB + 800 * MIB),  # too little is unused
        failed(requested=2 * GIB),  # all pieces together are too small
        failed(DeviceState(largest_unused=500 * MIB), allocated=6 * GIB),  # a piece is large enough
        failed(DeviceState(unused_in_pools=1800 * MIB), allocated=6 * GIB),
    ],
)
def test_unused_memory_is_not_always_fragmentation(failure: OutOfMemory) -> None:
    assert cause(failure) == (None, "")


def test_fragmentation_is_unused_memory_in_pieces() -> None:
    pieces = DeviceState(largest_unused=20 * MIB)
    kind, clause = cause(failed(pieces, allocated=6 * GIB))
    assert kind == "fragmentation"
    assert clause.endswith(
        "1.9 GiB are free in the allocator's segments, in pieces of at most 20.0 MiB"
    )
    step = cause_of(failed(pieces, phase="forward"))  # less is unused: only the advice has it
    assert step is not None
    assert step.kind == "step"
    assert "expandable_segments:True" in step.remedies[-1]


def test_expandable_segments_have_pieces_too_and_are_not_advised() -> None:
    pieces = DeviceState(largest_unused=18 * MIB, expandable=True)
    found = cause_of(failed(pieces, allocated=6 * GIB))
    assert found is not None
    assert found.clause.startswith("fragmentation, 1.9 GiB are free")
    assert found.remedies == (oom_room.PAGES,)


def test_unused_memory_of_other_streams_is_named() -> None:
    of_streams = DeviceState(largest_unused=20 * MIB, unused_of_streams=GIB)
    found = cause_of(failed(of_streams, allocated=6 * GIB))
    assert found is not None
    assert found.clause.endswith("1.0 GiB of it in segments of other CUDA streams")
    assert found.remedies[0] == oom_room.STREAMS


def test_a_few_unused_pieces_are_not_advised_on() -> None:
    step = failed(
        DeviceState(largest_unused=MIB),
        phase="forward",
        reserved=7 * GIB + 310 * MIB,
        free=390 * MIB,
    )
    found = cause_of(step)
    assert found is not None
    assert not found.remedies


def test_tensors_and_graphs_that_the_program_holds_are_named() -> None:
    step = failed(phase="forward", allocated=7 * GIB, reserved=7 * GIB)
    held = replace(step, held=HeldTensors("queue.batches", 60, 5 * GIB))
    assert cause(held, Background(level=GIB)) == (
        "held",
        "in the forward pass, 6.0 GiB were allocated since the step before, beside 1.0 GiB; `queue.batches` "
        "holds 60 tensors (5.0 GiB)",
    )
    little = replace(step, held=HeldTensors("queue.batches", 60, 2 * GIB))
    assert cause(little, Background(level=GIB))[0] == "step"
    graph = replace(step, graph=GraphInUse("total", 12))
    assert cause(graph, Background(level=GIB))[1].endswith(
        "; `total` keeps graphs for a backward pass in which most parameters are used at least 12 times"
    )
    elsewhere = replace(held, phase=None, line="a.py:3")
    assert cause(elsewhere)[0] == "held"
    assert cause(elsewhere)[1].startswith("a.py:3 requested it, with 7.0 GiB of 8.0 GiB in use; `q")


def test_private_pools_are_the_cause_if_their_unused_memory_would_be_enough() -> None:
    pools = DeviceState(in_pools=3 * GIB, unused_in_pools=GIB, of_graphs=True)
    assert cause(failed(pools))[1].startswith("CUDA graphs' private pools hold 3.0 GiB")
    assert cause(failed(replace(pools, of_graphs=False)))[1].startswith("private memory pools hold")
    assert cause(failed(replace(pools, unused_in_pools=0)))[0] != "private pools"


def test_growth_is_the_cause_if_the_request_would_have_fitted_without_it() -> None:
    grown = Background(level=7 * GIB, grown=5 * GIB, steps=100, finding=KEPT)
    assert cause(failed(), grown) == (
        "leak",
        "memory in use grew by 5.0 GiB in 100 steps, to 7.0 GiB of 8.0 GiB: `history` grows",
    )
    assert cause(failed(requested=6 * GIB), grown)[0] != "leak"
    assert cause(failed(), grown._replace(grown=GIB))[0] != "leak"


def test_a_step_is_compared_with_the_memory_before_it() -> None:
    step = failed(phase="forward", allocated=7 * GIB, reserved=7 * GIB)
    assert cause(step, Background(level=GIB))[1] == (
        "the forward pass does not fit: 6.0 GiB were allocated since the step before, beside 1.0 GiB"
    )
    assert cause(step, Background(level=6 * GIB))[1].startswith(
        "in the forward pass, 1.0 GiB were allocated"
    )
    assert cause(step)[1] == "in the forward pass, with 7.0 GiB of 8.0 GiB in use"
    first = failed(DeviceState(model=GIB), phase="forward", step=None, reserved=7 * GIB)
    assert cause(first)[1].endswith("6.0 GiB were allocated beside the model's 1.0 GiB")


def test_a_request_larger_than_the_device_and_a_failure_elsewhere() -> None:
    assert cause(failed(requested=9 * GIB)) == ("request", "the whole device has only 8.0 GiB")
    assert cause(failed(reserved=7 * GIB)) == (None, "")
    assert cause(failed(reserved=7 * GIB, line="a.py:3"))[1] == (
        "a.py:3 requested it, with 7.0 GiB of 8.0 GiB in use"
    )
    assert cause(failed(device="host")) == (None, "")
    assert cause(failed(device="host", requested=9 * GIB)) == (
        "request",
        "the whole memory is only 8.0 GiB",
    )
    assert cause(failed(worker="DataLoader worker process 0")) == (None, "")


def on_devices(step: int, *names: str) -> Batch:
    readings = tuple(DeviceReading(name, GIB, GIB, GIB, "exact", 0) for name in names)
    return replace(batch(step, GIB), devices=readings)


def test_the_trace_is_of_the_failed_device(tmp_path: Path) -> None:
    steps = [on_devices(step, "cuda0", "cuda1") for step in range(30)]
    first, second = replace(trace(3), device="cuda0"), replace(trace(2), device="cuda1")
    failure = failed(device="cuda1", phase="forward", reserved=7 * GIB)
    both = final_state(MadeRun(tmp_path / "a").write(*steps, second, first, failure).closed())
    assert both.trace == second
    only = final_state(MadeRun(tmp_path / "b").write(*steps, first, failure).closed())
    assert (only.trace, only.traced_device) == (None, "cuda0")
    text = report_of(only).text
    assert "No traced step shows the memory of cuda1: the traced steps are of cuda0" in text
    assert "layers=True" not in text


def test_a_caught_failure_is_no_cause(tmp_path: Path) -> None:
    caught = replace(FAILURE, caught=True, raised_as="KeyError: 'x'")
    run = (
        MadeRun(tmp_path)
        .write(*(batch(step, GIB) for step in range(30)), FAILURE, caught, End(at(60), "failed"))
        .closed()
    )
    state = final_state(run)
    assert (state.failure, state.survived) == (None, 1)
    assert summarize(run).verdict.startswith(
        "Ended with another error after step 29 (KeyError: 'x'); before, an allocation on cuda0 had failed"
    )


def test_a_failure_that_is_published_again_counts_once(tmp_path: Path) -> None:
    again = replace(FAILURE, message="CUDA out of memory. Tried to allocate 400.00 MiB.")
    steps = [batch(step, GIB) for step in range(40)]
    run = (
        MadeRun(tmp_path)
        .write(*steps[:30], FAILURE, *steps[30:], again, End(at(60), "failed"))
        .closed()
    )
    state = final_state(run)
    assert (state.failure, state.survived) == (again, 0)
