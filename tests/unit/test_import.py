"""``import memlog`` is light: it stands at the top of every training script."""

import json
import subprocess
import sys

HEAVY = ("torch", "wandb", "mlflow", "numpy", "pandas", "click", "rich")

MEASURE = f"""
import json, sys, time
begun = time.process_time()
import memlog
taken = time.process_time() - begun
print(json.dumps([taken, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def measured() -> tuple[float, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, loaded = json.loads(done.stdout)
    return seconds, loaded


def test_it_loads_nothing_heavy_and_adds_under_60_ms() -> None:
    runs = [measured() for _ in range(7)]
    assert all(loaded == [] for _, loaded in runs)
    # Of the processor's time, and the best of seven: what a busy machine adds is not memlog's.
    assert min(seconds for seconds, _ in runs) < 0.060


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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout
