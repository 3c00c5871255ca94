"""What a healthy run imports in the training process, and when."""

from pathlib import Path

import pytest
from support import child

SCRIPT = """
import sys, torch, memlog
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memlog.init("local", finish_timeout=60, alerts=sys.argv[1:])
for _ in range(300):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
memlog.finish()
rooms = {"growth", "leaks", "alerts.engine", "alerts.growth_meter", "reports"}
for name in sorted(sys.modules):
    room = name.removeprefix("memlog.")
    if room != name and any(room == each or room.startswith(each + ".") for each in rooms):
        print(name)
"""


def test_a_healthy_run_imports_nothing_that_judges(tmp_path: Path) -> None:
    assert child.run(SCRIPT, tmp_path, fork=False) == ""


def test_rules_are_judged_elsewhere(tmp_path: Path) -> None:
    assert (
        child.run(SCRIPT, tmp_path, "host.rss > 90 TiB", "host.rss grows > 1 TiB/step", fork=False)
        == ""
    )


ON_THE_TRAINING_THREAD = """
import os, sys, threading, torch, memlog
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
MEMLOG = os.path.dirname(memlog.__file__)
watching = False

def audit(event, arguments):
    if event == "import" and watching and threading.current_thread() is threading.main_thread():
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if arguments[0].startswith("memlog") or frame.f_code.co_filename.startswith(MEMLOG):
            print(arguments[0])

sys.addaudithook(audit)

def train():
    global watching
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout())
    optimizer = torch.optim.Adam(model.parameters())
    rows = DataLoader(TensorDataset(torch.randn(1000, 64)), batch_size=10, shuffle=True)
    memlog.init("local", finish_timeout=60, layers=True, budget=float(sys.argv[1]))
    watching = True
    for _ in range(6):
        for batch, in rows:
            model.train()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(50, 64))
    memlog.finish()
    watching = False

train()
"""


@pytest.mark.parametrize("budget", ["0.01", "1"])
def test_a_healthy_run_with_layers_imports_nothing_after_init(tmp_path: Path, budget: str) -> None:
    """No step waits for an import, and no signal handler's exception falls into one.

    Python removes an import's frames from the exceptions that pass it.
    """
    assert child.run(ON_THE_TRAINING_THREAD, tmp_path, budget, fork=False) == ""
