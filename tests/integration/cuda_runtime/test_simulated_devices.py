"""tests/cuda_runtime: what torch and NVML see of simulated devices in several processes and in rare modes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import child, devices

from memlog._internal.terminal import MIB

torch: Any = pytest.importorskip("torch")

pytestmark = [pytest.mark.integration, pytest.mark.cuda]


@pytest.fixture(autouse=True)
def only_simulated() -> None:
    if not devices.simulated():
        pytest.skip("tests of simulated devices")


@pytest.fixture
def own_devices(tmp_path: Path) -> dict[str, str]:
    """Variables of devices that only this test's programs share."""
    return {"FAKE_CUDA_STATE": str(tmp_path / "devices"), "FAKE_CUDA_MEMORY": "1GiB"}


def printed(
    script: str, folder: Path, *arguments: str, fork: bool = True, **environment: str
) -> Any:
    """Run a script with the helpers below, and return what it prints as JSON."""
    process = child.start(HELPERS + script, folder, *arguments, fork=fork, **environment)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


HELPERS = """
    import torch
    import ctypes
    import gc
    import json
    import os
    import threading

    MIB = 2**20

    def held(size, device="cuda"):
        return torch.empty(size, dtype=torch.uint8, device=device)

    def used():
        free, total = torch.cuda.mem_get_info()
        return total - free

    class Usage(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2)]

    class Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def nvml(index=0):
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        assert not library.nvmlInit_v2()
        assert not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        memory, processes, count = Memory(), (Usage * 16)(), ctypes.c_uint(16)
        assert not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        assert not library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
        running = {one.pid: one.used for one in processes[: count.value]}
        return {"used": memory.used, "free": memory.free, "total": memory.total, "running": running}

    def failure(function, *arguments):
        try:
            function(*arguments)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""
"""

HOLDER = """
    import sys

    kept = held(int(sys.argv[1]) * MIB)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def neighbour(tmp_path: Path, own_devices: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds 600 MiB of 1 GiB."""
    folder = tmp_path / "neighbour"
    folder.mkdir()
    pipe = subprocess.PIPE
    with child.start(HELPERS + HOLDER, folder, "600", stdin=pipe, **own_devices) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_nvml_shows_what_other_processes_hold_and_a_device_is_full_because_of_them(
    tmp_path: Path, own_devices: dict[str, str], neighbour: subprocess.Popen[str]
) -> None:
    script = """
    other = nvml()
    message = failure(held, 500 * MIB)
    kept = held(100 * MIB)
    print(json.dumps([other, message, nvml(), os.getpid()]))
    """
    other, message, both, pid = printed(script, tmp_path, **own_devices)
    assert other["running"] == {str(neighbour.pid): 600 * MIB}
    assert (other["used"], other["free"], other["total"]) == (600 * MIB, 424 * MIB, 1024 * MIB)
    assert message.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB")
    assert f"Process {neighbour.pid} has 600.00 MiB memory in use" in message
    assert both["running"] == {str(neighbour.pid): 600 * MIB, str(pid): 100 * MIB}


def test_a_killed_process_holds_nothing_any_more_also_before_it_is_waited_for(
    tmp_path: Path, own_devices: dict[str, str], neighbour: subprocess.Popen[str]
) -> None:
    os.kill(neighbour.pid, signal.SIGKILL)
    os.waitid(os.P_PID, neighbour.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    found = printed("\n    print(json.dumps(nvml()))", tmp_path, **own_devices)
    assert (found["used"], found["running"]) == (0, {})


def test_a_fork_neither_uses_nor_frees_its_parents_memory(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    kept = held(64 * MIB)
    reader, writer = os.pipe()
    if not os.fork():
        count = ctypes.c_int()
        runtime = ctypes.CDLL("libcudart.so.13")
        found = [runtime.cudaGetDeviceCount(ctypes.byref(count)), runtime.cudaSetDevice(0)]
        pointer = ctypes.c_void_p()
        found.append(runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1024)))
        os.write(writer, json.dumps([found, nvml()["used"]]).encode())
        os._exit(0)
    errors, seen = json.loads(os.read(reader, 1000))
    os.wait()
    print(json.dumps([errors, seen, used(), len(nvml()["running"])]))
    """
    initialization_error = 3
    errors, seen, used, running = printed(script, tmp_path, **own_devices)
    assert errors == [initialization_error] * 3
    assert (seen, used, running) == (64 * MIB, 64 * MIB, 1)


def test_threads_that_allocate_at_once_leave_nothing(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for size in range(1, 60):
                tensor = held(size * 100_000)
                del tensor
                if size % 10 == 0:
                    torch.cuda.empty_cache()

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    torch.cuda.empty_cache()
    print(json.dumps([torch.cuda.memory_reserved(), used(), nvml()["used"]]))
    """
    assert printed(script, tmp_path, **own_devices) == [0, 0, 0]


def test_a_context_takes_memory_of_the_device_and_is_listed(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    before = nvml()
    torch.cuda.init()
    torch.cuda.mem_get_info()
    print(json.dumps([before["running"], used(), list(nvml()["running"].values())]))
    """
    found = printed(script, tmp_path, FAKE_CUDA_CONTEXT="300MiB", **own_devices)
    assert found == [{}, 300 * MIB, [300 * MIB]]


VISIBLE = {
    "1": [2],
    " 2, 1": [1, 2],
    "GPU-fa4ec0da-0000-4000-8000-000000000001,0": [2, 1],
    "1,7,0": [2],
    "0,one": [1],
    "0,0": [],
    "GPU-fa4e": [],  # the beginning of several
    "": [],
}
"""Values of CUDA_VISIBLE_DEVICES, and the visible devices' GiB."""


def test_the_visible_devices_are_those_that_are_named(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    import sys

    def totals():
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_properties(at).total_memory >> 30 for at in range(count)]

    found = {}
    for visible in json.loads(sys.argv[1]):
        reader, writer = os.pipe()
        if not os.fork():   # CUDA has not begun yet
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            os.write(writer, json.dumps(totals()).encode())
            os._exit(0)
        found[visible] = json.loads(os.read(reader, 1000))
        os.wait()
    print(json.dumps([totals(), found]))
    """
    variables = {**own_devices, "FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_MEMORY_1": "2GiB"}
    every, found = printed(script, tmp_path, json.dumps([*VISIBLE]), **variables)
    assert every == [1, 2, 1]
    assert found == VISIBLE


def test_devices_have_memory_of_their_own_and_copies_between_them_are_real(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    there = torch.arange(MIB, dtype=torch.int32).to("cuda:1")
    here = there.to("cuda:0")
    held_by = [torch.cuda.memory_allocated(at) for at in (0, 1)]
    print(json.dumps([held_by, here.cpu()[-1].item(), [nvml(at)["used"] for at in (0, 1)]]))
    """
    found = printed(script, tmp_path, FAKE_CUDA_DEVICES="2", **own_devices)
    assert found == [[4 * MIB] * 2, MIB - 1, [20 * MIB] * 2]


def test_expandable_segments_map_and_unmap(tmp_path: Path, own_devices: dict[str, str]) -> None:
    script = """
    torch.cuda.memory._record_memory_history(context=None, max_entries=1000)
    tensors = [held(15 * MIB) for _ in range(4)]
    levels = [used()]
    (segment,) = torch.cuda.memory_snapshot()
    del tensors[1:]
    torch.cuda.empty_cache()
    levels.append(used())
    tensors.append(held(200 * MIB))
    message = failure(held, 1000 * MIB)
    del tensors
    torch.cuda.empty_cache()
    levels.append(used())
    actions = {entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]}
    stats = torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
    print(json.dumps([levels, segment["is_expandable"], segment["total_size"], sorted(actions), message]))
    """
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    levels, expandable, size, actions, message = printed(
        script, tmp_path, **own_devices, **variables
    )
    assert levels == [60 * MIB, 20 * MIB, 0]
    assert (expandable, size) == (True, 60 * MIB)
    assert {"segment_map", "segment_unmap", "oom"} <= set(actions)
    assert message.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 1000.00 MiB")


def test_the_drivers_pool_keeps_its_memory_until_it_is_trimmed(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    tensors = [held(100_000) for _ in range(50)]
    found = [torch.cuda.get_allocator_backend(), torch.cuda.memory_allocated(), used()]
    del tensors
    found += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), used()]
    torch.cuda.empty_cache()
    found += [torch.cuda.memory_reserved(), used(), failure(held, 2000 * MIB)[:16]]
    print(json.dumps(found))
    """
    variables = {**own_devices, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = printed(script, tmp_path, fork=False, **variables)  # read as torch is imported
    six = 6 * MIB  # 50 blocks of 100,352 bytes, in whole pages
    assert found == ["cudaMallocAsync", 50 * 100_352, six, 0, six, six, 0, 0, "OutOfMemoryError"]


def test_events_and_what_waits_for_them_lag(tmp_path: Path, own_devices: dict[str, str]) -> None:
    script = """
    beside = torch.cuda.Stream()
    tensor = held(30 * MIB)
    tensor.record_stream(beside)
    address = tensor.data_ptr()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = [failure(start.elapsed_time, end) != ""]
    start.record()
    end.record()
    found += [end.query(), torch.cuda.current_stream().query()]
    del tensor
    def states():
        blocks = (block for one in torch.cuda.memory_snapshot() for block in one["blocks"])
        return sorted(block["state"] for block in blocks if block["address"] == address)
    found.append(states())
    torch.cuda.synchronize()
    found += [end.query(), torch.cuda.current_stream().query(), start.elapsed_time(end) >= 0]
    other = held(30 * MIB)   # the allocator looks at the events
    found.append(other.data_ptr() == address)
    print(json.dumps(found))
    """
    found = printed(script, tmp_path, FAKE_CUDA_EVENT_LAG="400", **own_devices)
    assert found == [True, False, False, ["active_pending_free"], True, True, True, True]


def test_nothing_may_wait_for_a_stream_that_is_captured(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = held(MIB)
        waits = torch.cuda.synchronize, torch.cuda.current_stream().synchronize
        messages = [failure(wait) for wait in waits]
    torch.cuda.synchronize()
    print(json.dumps(messages))
    """
    messages = printed(script, tmp_path, **own_devices)
    assert ["not permitted when stream is capturing" in message for message in messages] == [
        True
    ] * 2


@pytest.mark.parametrize(("capability", "size"), [("8.0", 8.125), ("9.0", 32)])
def test_the_capability_decides_on_the_workspaces_of_cublas(
    tmp_path: Path, own_devices: dict[str, str], capability: str, size: float
) -> None:
    script = """
    layer, batch = torch.nn.Linear(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda")
    before = torch.cuda.memory_allocated()
    result = layer(batch) @ batch
    grown = torch.cuda.memory_allocated() - before
    torch._C._cuda_clearCublasWorkspaces()
    cleared = grown - (torch.cuda.memory_allocated() - before)
    print(json.dumps([torch.cuda.get_device_capability(), cleared / MIB]))
    """
    found = printed(script, tmp_path, FAKE_CUDA_CAPABILITY=capability, **own_devices)
    assert found == [[int(part) for part in capability.split(".")], size]


def test_a_model_larger_than_the_hosts_memory_takes_none_of_it(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = [torch.nn.Parameter(torch.zeros(2**30, device="cuda")) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.clone(parameter.detach())
    optimizer = torch.optim.Adam(parameters)
    optimizer.step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps([torch.cuda.memory_allocated() >> 30, grown]))
    """
    variables = {**own_devices, "FAKE_CUDA_MEMORY": "400GiB", "FAKE_CUDA_COPY": "4k"}
    allocated, grown = printed(script, tmp_path, **variables)
    assert allocated == 16 * 4 * 4
    assert grown < 500


def test_copies_to_the_host_are_whole_if_those_to_a_device_are_not(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    there = torch.zeros(4096, device="cuda")
    here = torch.ones(4096)
    here.copy_(there)
    print(json.dumps([here.sum().item(), torch.ones(4096).cuda().cpu().sum().item()]))
    """
    assert printed(script, tmp_path, **own_devices, FAKE_CUDA_COPY="4k") == [0, 1024]


def test_each_rank_of_the_nccl_group_acts_as_if_the_others_held_the_same(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=2, device_id=torch.device("cuda:0"))
    own = torch.arange(4, dtype=torch.float32).cuda()
    both = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(both, own)
    half = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(half, own)
    dist.all_reduce(own)
    smaller = dist.new_group([0])
    dist.all_reduce(own, group=smaller)
    dist.broadcast(own, 0)
    print(json.dumps([both.tolist(), half.tolist(), own.tolist()]))
    dist.destroy_process_group()
    """
    both, half, own = printed(script, tmp_path, **own_devices)
    assert both == [0, 1, 2, 3] * 2
    assert (half, own) == ([0, 1], [0, 1, 2, 3])


def test_what_no_library_computes_is_an_error(tmp_path: Path, own_devices: dict[str, str]) -> None:
    script = """
    matrix = torch.eye(4).cuda()
    print(json.dumps([failure(torch.linalg.svd, matrix), failure(torch.linalg.eigh, matrix)]))
    """
    assert all(printed(script, tmp_path, **own_devices))


def test_nvml_answers_only_between_its_beginning_and_its_end(
    tmp_path: Path, own_devices: dict[str, str]
) -> None:
    script = """
    library, count, uninitialized = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), 1
    found = [library.nvmlDeviceGetCount_v2(ctypes.byref(count)), library.nvmlShutdown()]
    found += [library.nvmlInit_v2(), library.nvmlDeviceGetCount_v2(ctypes.byref(count))]
    found += [library.nvmlShutdown(), library.nvmlDeviceGetCount_v2(ctypes.byref(count))]
    print(json.dumps([found, count.value]))
    """
    assert printed(script, tmp_path, **own_devices) == [[1, 1, 0, 0, 0, 1], 1]
