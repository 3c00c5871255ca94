"""``import memlog`` is light: it stands at the top of every training script."""

import json
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "wandb", "mlflow", "numpy", "pandas", "click", "rich")

LOADED = f"""
import json, sys
before = set(sys.modules)
import memlog
after = set(sys.modules) - before
print(json.dumps([[name for name in {HEAVY!r} if name in sys.modules], len(after)]))
"""
MOST_MODULES = 160
"""Maximum number of modules that ``import memlog`` loads, including msgspec and the standard library."""


def printed(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def test_it_loads_nothing_heavy() -> None:
    heavy, modules = json.loads(printed(LOADED))
    assert heavy == []
    assert modules < MOST_MODULES


def test_the_tracer_loads_no_torch_until_it_traces() -> None:
    program = """
import sys, memlog
tracer = memlog.MemoryTracer(device="cpu")
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as where it is not installed
try:
    with tracer.trace():
        pass
except memlog.MissingExtraError as error:
    print(error)
"""
    assert "pip install torch" in printed(program)


def test_the_helper_process_samples_before_it_loads_what_trackers_and_reports_need() -> None:
    program = """
import sys, memlog.delivery.helper.__main__
late = ("alerts", "reports", "trace", "tracer", "delivery.uploader.uploader", "delivery.helper.postmortem")
print([name for name in late if "memlog." + name in sys.modules])
"""
    assert printed(program).split() == ["[]"]


def test_a_healthy_run_loads_nothing_of_the_reports(tmp_path: Path) -> None:
    program = f"""
import sys, memlog
session = memlog.init("local", dir={str(tmp_path)!r})
for _ in range(60):
    session.step()
memlog.finish()
print([name for name in sys.modules if name.startswith(("memlog.reports", "memlog.artifacts"))])
"""
    assert printed(program).split() == ["[]"]


def test_a_traced_step_imports_nothing_of_the_tracer(tmp_path: Path) -> None:
    """A user's signal may end a step at any time. An import that is interrupted may have to run again."""
    program = f"""
import sys, torch, memlog
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
session = memlog.init("local", dir={str(tmp_path)!r}, layers=True)
before = set(sys.modules)
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print([name for name in set(sys.modules) - before if name.startswith(("memlog.trace", "memlog.tracer"))])
memlog.finish()
"""
    assert printed(program).split() == ["[]"]


def test_a_session_without_layers_loads_no_tracer(tmp_path: Path) -> None:
    program = f"""
import sys, torch, memlog
memlog.init("local", dir={str(tmp_path)!r})
print([name for name in sys.modules if name.startswith("memlog.tracer.engines")])
memlog.finish()
"""
    assert printed(program).split() == ["[]"]
