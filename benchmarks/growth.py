"""Test growth rules in real processes: which healthy and leaking scripts trigger which rule.

``python benchmarks/growth.py`` takes a few minutes. It needs torch and NumPy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap

RULES = ("host.rss grows > 5 MiB/step", "host.rss grows > 10 MiB/100 steps")
STEPS = 200

TRAINING = """
    import collections, ctypes, random, sys
    import numpy as np
    import torch
    import memlog

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    MIB = 1024**2
    layers = (torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(4))
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    kept, cache, ring = [], {{}}, collections.deque(maxlen=10)
    mapped = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]

    def blob(mib):
        return torch.ones(mib * MIB // 4)

    memlog.init("local", alerts={rules}, on_alert=lambda alert: print(alert.step, alert.rule))
    for step in range({steps}):
        size = random.choice((16, 64, 256, 512)) if {varies} else 64
        loss = model(torch.randn(size, 512)).square().mean()
        loss.backward()
        {body}
        optimizer.step()
        optimizer.zero_grad()
"""
HEALTHY = {
    "plain": "pass",
    "variable-length inputs": "pass",
    "a cache that fills within 40 steps": "cache.setdefault(step % 40, blob(2))",
    "ring buffer": "ring.append(blob(8))",
    "sawtooth": "kept.append(blob(6)) if len(kept) < 12 else kept.clear()",
    "one-time jump": "kept.append(blob(300)) if step == 37 else None",
    "garbage in cycles": "a = [blob(2)]; a.append(a)",
    "a mapped file": "mapped[step * MIB : (step + 1) * MIB].max()",
    "evaluation every 20": (
        "model(torch.randn(20_000, 512)).sum().item() if step % 20 == 19 else None"
    ),
    "a copy every 25, one at a time": "cache.update(ema=blob(40)) if step % 25 == 0 else None",
}
LEAKING = {
    "kept tensors": "kept.append(blob(6))",
    "kept after 60 steps": "kept.append(blob(8)) if step > 60 else None",
    "kept graphs": "kept.append(model(torch.randn(1024, 512)).mean())",
    "a C library": "ctypes.memset(libc.malloc(6 * MIB), 1, 6 * MIB)",
    "kept, with lengths that vary": "kept.append(blob(6))",
}


def alarms(name: str, body: str, mapped: str) -> list[str]:
    """Run a script and return the alerts of its rules, each as ``STEP RULE``."""
    program = textwrap.dedent(TRAINING).format(
        rules=list(RULES), steps=STEPS, body=body, varies="var" in name
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, mapped],
            env={**os.environ, "MEMLOG_DIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout.splitlines()


def main() -> None:
    """Run every script and print a line for each."""
    with tempfile.NamedTemporaryFile() as mapped:
        mapped.write(bytes(STEPS * 1024**2))
        mapped.flush()
        for kind, scripts in (("healthy", HEALTHY), ("leaking", LEAKING)):
            for name, body in scripts.items():
                found = alarms(name, body, mapped.name)
                print(f"{kind}  {name:36} {'; '.join(found) or '-'}", flush=True)


if __name__ == "__main__":
    main()
