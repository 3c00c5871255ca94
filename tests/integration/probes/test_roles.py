"""Roles of real child processes."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from memlog.probes.machine import ProcessTree

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

WORKERS = """
import subprocess, sys, time, multiprocessing, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, n): time.sleep(100)
if __name__ == "__main__":
    other = subprocess.Popen(["sleep", "100"])
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    fork.start()
    loading = iter(torch.utils.data.DataLoader(Data(), num_workers=2))
    print(flush=True)
    time.sleep(100)
"""


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_children_have_their_roles_and_sizes() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKERS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            tree = ProcessTree(process.pid)
            names = ["sleep", "worker process", "DataLoader worker 0", "DataLoader worker 1"]
            # A worker names itself a moment after it was started.
            wait_until(lambda: [child.role for child in tree.read().children] == names)
            reading = tree.read()
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                with suppress(psutil.Error):
                    child.kill()
    assert [child.pid for child in reading.children] == [child.pid for child in children]
    assert all((child.anon or 0) > 0 for child in reading.children)
    assert reading.children_shared is not None
