"""A healthy run judges nothing in the training process, so it imports nothing that judges or searches."""

from pathlib import Path

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
