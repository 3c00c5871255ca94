"""Real training scripts: the ones that grow end with a finding, healthy ones with none."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child

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
alerts = []
memlog.init("local", name="made up", on_alert=alerts.append)
kept = []
def steps():
    "As many as memlog needs. On a busy machine the helper process sees 120 steps at once, after the last."
    for number in range(600):
        if number >= 120 and alerts:
            return
        yield number
        time.sleep(0.005)
"""

GROWING = {
    "Python objects": (
        "growing_container",
        "for _ in steps(): train(); kept.append([{'k': str(n)} for n in range(3000)])",
    ),
    "a text file in memory": (
        "python_memory",
        """
import io
written = io.StringIO()
for n in steps(): train(); written.write(f"{n:09}" * 80_000)
""",
    ),
    "a C library": (
        "native_library",
        """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in steps(): train(); ctypes.memset(libc.malloc(1_000_000), 1, 1_000_000)
""",
    ),
    "SQLite": (
        "native_library",
        """
import sqlite3
database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE log (data BLOB)")
for _ in steps(): train(); database.execute("INSERT INTO log VALUES (ZEROBLOB(1000000))")
""",
    ),
    "shared memory": (
        "kept_tensors",
        "for _ in steps(): train(); kept.append(torch.ones(300_000).share_memory_())",
    ),
    "a worker": (
        "worker_process",
        """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2400
    def __getitem__(self, n):
        kept.append(bytearray(os.urandom(300_000)))
        time.sleep(0.004)
        return torch.randn(64)
for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=1): train(batch)
""",
    ),
}

HEALTHY = {
    "garbage in cycles": """
class Node: pass
for _ in range(150):
    node = Node()
    node.itself, node.data = node, torch.ones(200_000)
    train()
""",
    "a mapped file and a jump": """
file = tempfile.NamedTemporaryFile()
file.truncate(150_000_000)
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for n in range(150):
    mapped[n * 1_000_000:(n + 1) * 1_000_000]
    train()
    if n == 100: kept.append(torch.ones(30_000_000))
""",
    "a buffer that fills": """
import numpy
buffer = numpy.zeros((200, 200_000))
for n in range(150):
    buffer[n] = n
    train()
    time.sleep(0.01)
""",
    "inputs of many lengths": """
for n in range(150): train(torch.randn(1 + n * 7919 % 3000, 64))
""",
}


def findings(scripts: dict[str, str], folder: Path) -> dict[str, list[Finding]]:
    """Run scripts to their ends; return the findings of each trainer and its helper."""
    found = {}
    for name, script in scripts.items():
        (own := folder / name).mkdir()
        child.run(LOOP + script + "\nmemlog.finish()", own, fork=False, OMP_NUM_THREADS="1")
        found[name] = list(_read(own / "memlog_runs"))
    return found


def _read(folder: Path) -> Iterator[Finding]:
    [run] = (path.parent for path in folder.glob("*/delivery"))
    for file in RunDirectory(run).files():
        for entry in file.read():
            if isinstance(entry.event, Finding):
                yield entry.event


def test_growth_is_found_once_and_of_its_kind(tmp_path: Path) -> None:
    found = findings({name: code for name, (_, code) in GROWING.items()}, tmp_path)
    kinds = {name: [finding.kind for finding in of] for name, of in found.items()}
    assert kinds == {name: [kind] for name, (kind, _) in GROWING.items()}
    assert all((finding.rate or 0) > 0 for of in found.values() for finding in of)
    [in_sqlite] = found["SQLite"]
    assert in_sqlite.title.startswith("SQLite keeps ")
    assert "(`database` in `__main__`)" in in_sqlite.title


def test_a_healthy_script_has_no_finding(tmp_path: Path) -> None:
    assert findings(HEALTHY, tmp_path) == {name: [] for name in HEALTHY}
