"""Which errors mean that memory ran out, and what is read from them: real ones, and chains of them."""

import mmap
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from memlog.events import OutOfMemory
from memlog.oom import circumstances
from memlog.oom.errors import complete, describe, failed_allocation

TIB = 1024**4


def caught(allocate: object) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError)) as found:
        allocate()  # type: ignore[operator]
    return found.value


def of_torch() -> BaseException:
    return caught(lambda: torch.empty(2**50, dtype=torch.uint8))


def of_numpy() -> BaseException:
    return caught(lambda: np.ones(2**55, dtype=np.uint8))


def of_python() -> BaseException:
    return caught(lambda: bytearray(2**60))


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    with pytest.raises(type(error)) as found:
        raise error from cause
    return found.value


def test_messages_of_torch_numpy_and_python_are_parsed() -> None:
    events = [describe(error, 3) for error in (of_torch(), of_numpy(), of_python())]
    assert [event.requested for event in events] == [2**50, 2**55, None]
    assert [event.device for event in events] == ["host"] * 3
    assert "you tried to allocate" in events[0].message
    assert events[1].message.startswith("Unable to allocate 32.0 PiB")
    assert events[2].message == "MemoryError"


def test_the_cause_of_the_final_exception_is_found() -> None:
    memory = of_torch()
    outer = raised(ValueError("a layer above"), raised(RuntimeError("trainer: step 0"), memory))
    assert failed_allocation(outer) is memory
    event = describe(memory, 0, outer)
    assert event.requested == 2**50
    assert event.raised_as == "ValueError: a layer above"
    assert describe(memory, 0, memory).raised_as is None


def test_what_was_being_handled_is_found_also_where_python_does_not_show_it() -> None:
    try:
        try:
            bytearray(2**60)
        except MemoryError as error:
            memory = error
            raise SystemExit(1) from None
    except SystemExit as error:
        leaving = error
    assert failed_allocation(leaving) is memory


def test_the_first_of_those_that_quote_it_leads_to_the_layer() -> None:
    memory = of_torch()
    assert failed_allocation(raised(RuntimeError(f"step failed: {memory}"), memory)) is memory


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_one_of_a_group_is_found() -> None:
    memory = of_python()
    group = ExceptionGroup("tasks", [ValueError("no"), memory])  # type: ignore[name-defined,unused-ignore]  # noqa: F821 - since 3.11
    assert failed_allocation(group) is memory


def test_other_errors_are_no_failed_allocation() -> None:
    assert failed_allocation(None) is None
    assert failed_allocation(raised(RuntimeError("shapes"), KeyError("k"))) is None


def test_a_circular_chain_ends() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert failed_allocation(first) is None


IN_A_WORKER = """Caught {kind} in DataLoader worker process 2.
Original Traceback (most recent call last):
  File "data.py", line 7, in __getitem__
    return load(index)
{error}
"""


@pytest.mark.parametrize(
    ("kind", "line", "requested"),
    [
        (
            "RuntimeError",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)",
            4 * 1024**3,
        ),
        (
            "_ArrayMemoryError",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.00 TiB for an array",
            2 * TIB,
        ),
        ("MemoryError", "MemoryError", None),
    ],
)
def test_a_workers_error_names_the_worker(kind: str, line: str, requested: int | None) -> None:
    error = raised(RuntimeError(IN_A_WORKER.format(kind=kind, error=line)))
    assert failed_allocation(error) is error
    event = describe(error, 0)
    assert (event.worker, event.requested) == ("DataLoader worker process 2", requested)
    assert event.message == line
    # The trainer's own room says nothing of the worker's.
    assert (event.free, event.limit, event.limited_by, event.allocated) == (None,) * 4


@pytest.mark.parametrize("signal", ["Killed", "Bus error"])
def test_a_worker_that_the_kernel_ended_is_named_with_its_signal(signal: str) -> None:
    killed = RuntimeError(f"DataLoader worker (pid 4242) is killed by signal: {signal}. ")
    raised_from = RuntimeError("DataLoader worker (pid(s) 4242) exited unexpectedly")
    raised_from.__cause__ = killed
    assert failed_allocation(raised_from) is killed
    event = describe(killed, 3, raised_from)
    assert (event.worker, event.signal) == ("DataLoader worker (pid 4242)", signal)
    assert event.raised_as == "RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly"
    assert (event.requested, event.free, event.layer) == (None, None, None)


@pytest.mark.parametrize("signal", ["Segmentation fault", "Aborted", "Terminated"])
def test_a_worker_that_died_of_something_else_is_not_told(signal: str) -> None:
    message = f"DataLoader worker (pid 4242) is killed by signal: {signal}. "
    assert failed_allocation(RuntimeError(message)) is None


@pytest.fixture
def room_for_a_gib() -> object:
    before = resource.getrlimit(resource.RLIMIT_AS)
    peak = circumstances._own_memory()["VmPeak"]
    resource.setrlimit(resource.RLIMIT_AS, (peak + 1024**3, before[1]))
    yield peak + 1024**3
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_free_is_what_was_free_before_the_stack_unwound(room_for_a_gib: int) -> None:
    memory = circumstances._own_memory()
    freed = (
        memory["VmPeak"] - memory["VmSize"]
    )  # by tests before this one: room that is there besides

    def step() -> object:
        sizes = (freed + 600 * 2**20, 500 * 2**20)
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    error = caught(step)
    error.__traceback__ = None  # and so what the step held is given back
    event = describe(error, 0)
    assert event.requested == 500 * 2**20
    assert event.free < event.requested <= event.free_after
    assert event.limit == room_for_a_gib
    assert event.allocated == event.limit - event.free


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_mapping_that_fails_is_a_failed_allocation(room_for_a_gib: int) -> None:
    """A file that `mmap` maps, and torch's shared memory, raise errors of other kinds."""
    with pytest.raises(OSError, match="Cannot allocate memory") as mapped:
        mmap.mmap(-1, room_for_a_gib)
    # As torch words it. The real one leaves a file of that size in /dev/shm, which is the machine's memory.
    shared = RuntimeError(
        f"unable to mmap {room_for_a_gib} bytes from file </torch_1_2_0>: Cannot allocate memory (12)"
    )
    assert failed_allocation(mapped.value) is mapped.value
    assert failed_allocation(shared) is shared
    describe(shared, 0)  # the first call takes memory, which would raise VmHWM between two readings
    circumstances._own_memory()
    event = describe(shared, 0)
    assert (event.device, event.requested) == ("host", room_for_a_gib)
    # The kernel sums up the counts of all processors inexactly.
    assert event.resident == pytest.approx(circumstances._own_memory()["VmHWM"], abs=2**20)
    assert event.idle is None or 0 <= event.idle < event.resident
    assert failed_allocation(FileNotFoundError(2, "No such file")) is None


def test_what_a_closure_does_is_not_the_optimizers() -> None:
    """Lightning runs the whole step in a closure of the optimizer's."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def in_the_model() -> None:
        class Greedy(torch.nn.Module):
            def forward(self) -> None:
                raise MemoryError

        Greedy()()

    def beside_it() -> None:
        raise MemoryError

    class Hungry(torch.optim.SGD):
        def step(self, _closure: object = None) -> None:  # type: ignore[override]
            beside_it()

    def place(allocate: object) -> tuple[str | None, str | None]:
        event = describe(caught(allocate), 0)
        return event.layer, event.phase

    assert place(lambda: optimizer.step(in_the_model)) == ("Greedy", "forward")
    assert place(lambda: optimizer.step(beside_it)) == (None, None)
    assert place(Hungry(model.parameters(), lr=0.1).step) == (None, "optimizer")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    ],
)
def test_the_driver_and_libraries_run_out_beside_the_allocator(message: str) -> None:
    error = raised(RuntimeError(message))
    assert failed_allocation(error) is error
    event = describe(error, 3)
    assert (event.device, event.requested, event.activity) == ("device", None, None)


def test_pinned_memory_is_known_by_the_programs_function() -> None:
    event = describe(caught(pin_memory), 3)
    assert (event.device, event.activity) == ("host", "pinned memory")


def pin_memory() -> None:
    raise RuntimeError("CUDA error: out of memory")


IN_SPAWNED = """

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 3, in work
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a capacity \
of 16.00 GiB of which 1.00 GiB is free.
"""


def test_a_process_that_torch_spawned_is_named() -> None:
    event = describe(raised(ValueError(IN_SPAWNED)), 3)
    assert failed_allocation(raised(ValueError(IN_SPAWNED))) is not None
    assert event.worker == "Process 2 of torch.multiprocessing.spawn"
    assert (event.device, event.requested, event.free) == ("cuda1", 2 * 1024**3, 1024**3)
    other = IN_SPAWNED.replace("torch.OutOfMemoryError: CUDA out of memory", "KeyError: 'x'")
    assert failed_allocation(raised(ValueError(other))) is None


ASYNC = """Allocation on device 1 would exceed allowed memory. (out of memory)
Currently allocated     : 22.25 MiB
Requested               : 20.00 GiB
Device limit            : 16.00 GiB
Free (according to CUDA): 15.50 GiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB"""


def test_the_asynchronous_allocators_message_is_parsed() -> None:
    event = describe(raised(torch.OutOfMemoryError(ASYNC)), 3)
    gib = 1024**3
    assert (event.device, event.requested, event.free) == ("cuda1", 20 * gib, 15.5 * gib)
    assert (event.limit, event.limited_by) == (16 * gib, "the device's memory")


def test_a_devices_failure_keeps_torchs_text_without_credentials() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 16.00 GiB of which "
        "1.00 GiB is free. Process 7 has 6.00 GiB memory in use. See https://user:secret@example.org/."
    )
    event = describe(raised(torch.OutOfMemoryError(text)), 3)
    assert event.device == "cuda3"
    assert "Process 7 has 6.00 GiB" in event.message
    assert "secret" not in event.message


def test_what_memlog_saw_is_completed_by_the_exception() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB"
    described = describe(raised(torch.OutOfMemoryError(text)), 3)
    unknown = (None,) * 5
    seen = [
        OutOfMemory(1, 2, "cuda0", size, *unknown, "layer", "forward", "CUDA out of memory")
        for size in (2 * 1024**3, 3 * 1024**3)
    ]
    found = complete(described, seen)
    assert (found.time_us, found.layer, found.step, found.message) == (1, "layer", 2, text)
    assert found.requested == 2 * 1024**3
    assert complete(described, seen[1:]) is described
