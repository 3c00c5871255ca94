"""Real training scripts: the ones that grow end with a finding, healthy ones with none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memlog.events import Finding
from memlog.journal import RunDirectory

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

LOOP = """
import gc, mmap, os, tempfile, time
import torch, memlog
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(batch=torch.randn(8, 64)):
    optimizer.zero_grad()
    output = model(batch)
    output.square().mean().backward()
    optimizer.step()
    return output
memlog.init("local", name="made up")
kept = []
"""

GROWING = {
    "a list of arrays": (
        "growth",
        "for _ in range(120): train(); kept.append(torch.ones(300_000))",
    ),
    "Python objects": (
        "growth",
        "for _ in range(120): train(); kept.append([{'k': str(n)} for n in range(3000)])",
    ),
    "a C library": (
        "growth",
        """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in range(120): train(); ctypes.memset(libc.malloc(1_000_000), 1, 1_000_000)
""",
    ),
    "shared memory": (
        "shared_memory",
        "for _ in range(120): train(); kept.append(torch.ones(300_000).share_memory_())",
    ),
    "a worker": (
        "worker_process",
        """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1600
    def __getitem__(self, n):
        kept.append(bytearray(os.urandom(300_000)))
        time.sleep(0.004)
        return torch.randn(64)
for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=1): train(batch)
""",
    ),
}

HEALTHY = {
    "a cache that fills": """
cache = {}
for n in range(240):
    cache.setdefault(n % 60, torch.ones(300_000))
    train()
""",
    "a buffer that is emptied": """
for n in range(240):
    train()
    kept.append(torch.ones(300_000))
    if n % 30 == 29: kept.clear()
""",
    "garbage in cycles": """
class Node: pass
for _ in range(240):
    node = Node()
    node.itself, node.data = node, torch.ones(200_000)
    train()
""",
    "a mapped file and a jump": """
file = tempfile.NamedTemporaryFile()
file.truncate(240_000_000)
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for n in range(240):
    mapped[n * 1_000_000:(n + 1) * 1_000_000]
    train()
    if n == 100: kept.append(torch.ones(30_000_000))
""",
    "inputs of many lengths": """
for n in range(240): train(torch.randn(1 + n * 7919 % 3000, 64))
""",
}


def findings(code: str, folder: Path) -> list[Finding]:
    """Run a script to its end; return the findings of the trainer and of its helper."""
    script = folder / "train.py"
    script.write_text(f"{LOOP}{code}\nmemlog.finish()\n")
    environment = {**os.environ, "MEMLOG_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script], env=environment, check=True, timeout=120, cwd=folder)
    [run] = (path.parent for path in folder.glob("*/delivery"))
    return [
        entry.event
        for file in RunDirectory(run).files()
        for entry in file.read()
        if isinstance(entry.event, Finding)
    ]


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_found(name: str, tmp_path: Path) -> None:
    kind, code = GROWING[name]
    [found] = findings(code, tmp_path)
    assert found.kind == kind
    assert found.rate is not None
    assert found.rate > 0


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_has_no_finding(name: str, tmp_path: Path) -> None:
    assert findings(HEALTHY[name], tmp_path) == []
