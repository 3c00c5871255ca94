"""Causes that reports name for child processes that run out of memory in several ways."""

import sys
import textwrap
from pathlib import Path

import pytest
from support.failing import child, ended, only_run, wait_for_report

pytestmark = pytest.mark.integration

# Narrow layers: large activations with little arithmetic.
SHORT = """
    import ctypes
    import resource
    import torch
    import memlog

    # Else the allocator keeps what a step freed, in blocks of up to 32 MiB, as if the program had kept it.
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, in_use + 2**28))

    def train(rows):
        model(torch.randn(rows, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with memlog.init("local", model=model, layers=True, finish_timeout=60):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "for step in range(8): train(4096)\n"
            "        kept = [model(torch.randn(16384, 16)) for _ in range(1000)]",
            "no earlier step's peak was more than",
        ),
        (
            "kept = []\n        for step in range(40): train(4096); kept.append(torch.ones(2**22))",
            "too few to find the cause",
        ),
    ],
    ids=["keeps an evaluation's graphs", "keeps in few steps"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_run_of_few_steps_gets_advice_from_its_steps(
    tmp_path: Path, body: str, expected: str
) -> None:
    assert "DefaultCPUAllocator" in ended(tmp_path, SHORT.format(body=body))
    helps = wait_for_report(only_run(tmp_path)).partition("## What would help")[2]
    assert expected in helps
    assert "something keeps memory of each step. " not in helps
    assert "a peak of about" not in helps


GROWS = """
    import resource
    import torch
    import memlog

    torch.set_num_threads(1)
    blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4))
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
    memlog.init("local", model=model, layers=True, budget=1, finish_timeout=60)
    optimizer = torch.optim.Adam(model.parameters())

    def train(batch):
        model(torch.randn(batch, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**29, in_use + 2**29))
    for exponent in (4, 4, 4, *range(17, 40)):
        train(2**exponent)
"""


def test_a_larger_batch_is_named_rather_than_a_lighter_optimizer(tmp_path: Path) -> None:
    assert "DefaultCPUAllocator" in ended(tmp_path, GROWS)
    helps = wait_for_report(only_run(tmp_path)).partition("## What would help")[2]
    assert "The step that failed needed far more than the traced one" in helps
    assert "A smaller batch, or shorter or smaller inputs" in helps
    assert "`torch.utils.checkpoint`" in helps
    assert "SGD" not in helps
    assert "8 bits" not in helps


UNDER_A_LIMIT = """
    import ctypes, resource, time
    import numpy as np
    import torch
    import memlog

    MIB = 1024**2
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 1))
    scale = torch.ones(1, requires_grad=True)
    memlog.init("local", model=model, layers=True, budget=1, finish_timeout=60)
    optimizer = torch.optim.Adam([*model.parameters(), scale])

    def train():
        model(torch.ones(64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)

    def limit(more):
        with open("/proc/self/status") as status:
            (used,) = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize")]
        resource.setrlimit(resource.RLIMIT_AS, (used + more * MIB,) * 2)

    train()
    {body}
"""
LARGER_AND_LARGER = """
    limit(500)
    for step in range(1000):
        batch = torch.ones(1_600_000 * step)
        (batch * scale).square().mean().backward()
        train()
"""
MAPPED = """
    with open("mapped", "wb") as file:
        for _ in range(300):
            file.write(bytes(MIB))
    data = np.memmap("mapped", dtype=np.uint8, mode="r")
    for step in range(100):
        data[step * 3 * MIB : (step + 1) * 3 * MIB].max()
        train()
    time.sleep(1.5)
    limit(400)
    torch.empty(500 * MIB, dtype=torch.uint8)
"""
C_LIBRARY = """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    limit(500)
    others = []
    for _ in range(1000):
        for _ in range(64):
            if taken := libc.malloc(100_000):
                ctypes.memset(taken, 1, 100_000)
            else:
                others.append(torch.ones(16384))
        train()
"""


@pytest.mark.parametrize(
    ("body", "expected", "unexpected"),
    [
        (LARGER_AND_LARGER, "So the steps became larger", "something keeps"),
        (MAPPED, "are pages of mapped files", "something keeps"),
        (C_LIBRARY, "something keeps memory of each step", "It failed in the optimizer's step"),
    ],
    ids=["larger and larger", "a mapped file", "a C library"],
)
def test_the_cause_that_is_named_is_the_one(
    tmp_path: Path, body: str, expected: str, unexpected: str
) -> None:
    program = UNDER_A_LIMIT.replace("{body}", textwrap.indent(textwrap.dedent(body), "    "))
    with child(tmp_path, program) as process:
        process.communicate(timeout=150)
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Out of memory on the host after step"), text
    helps = text.partition("## What would help")[2]
    assert expected in helps
    assert unexpected not in text
