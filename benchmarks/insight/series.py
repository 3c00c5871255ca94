"""Measure how a script's memory develops, without memlog: one reading after each optimizer step.

A reading is the host's memory plus the bytes that tensors hold on the device.

As a program (``python -m benchmarks.insight.series DEVICE SCRIPT OUT``) this module runs SCRIPT as
``__main__``, with its tensors on DEVICE, and writes its readings to OUT when it ends.
"""

from __future__ import annotations

import atexit
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.insight.on_device import run_script

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
ROOT = HERE.parents[1]
MIB = 2**20


class Series(NamedTuple):
    """The memory of a script and its child processes after each optimizer step, and its processor time.

    Attributes:
        levels: Bytes after each optimizer step.
        seconds: Processor time of the script and of those children that have ended.
    """

    levels: tuple[int, ...]
    seconds: float

    def rate(self, begin: float = 0.4) -> float:
        """Return the growth in bytes per step, after the share ``begin`` (0 to 1) of the steps.

        The result is the slope between the medians of the first and of the last quarter of this range. A few
        outliers do not change it, and neither does a rise in the middle that ends before the last quarter.
        """
        regime = self.levels[int(len(self.levels) * begin) :]
        quarter = max(len(regime) // 4, 1)
        rise = statistics.median(regime[-quarter:]) - statistics.median(regime[:quarter])
        return rise / max(len(regime) - quarter, 1)

    def growth(self, begin: float = 0.4) -> float:
        """Return the growth after the share ``begin`` of the steps, divided by the level at that point."""
        regime = self.levels[int(len(self.levels) * begin) :]
        return self.rate(begin) * len(regime) / regime[0]


def environment(seed: int) -> dict[str, str]:
    """Return the environment for a script: one thread, a seed, and none of memlog's variables.

    The script finds this package, which sets the device.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMLOG_")}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return kept | threads | {"SEED": str(seed), "PYTHONPATH": str(ROOT)}


def measure(name: str, seed: int = 0, timeout: float = 300, *, device: str = "cpu") -> Series:
    """Run a script with its tensors on a device, and return its series.

    Raises:
        RuntimeError: The script failed; the message has the end of its output.
    """
    return measure_file(SCRIPTS / f"{name}.py", seed, timeout, device=device)


def measure_file(
    script: Path,
    seed: int = 0,
    timeout: float = 300,
    *,
    device: str = "cpu",
    variables: Mapping[str, str] | None = None,
) -> Series:
    """Do the same as `measure` for any file. ``variables`` are added to the environment."""
    with tempfile.TemporaryDirectory(prefix="memlog-insight-") as folder:
        out = Path(folder) / "series.json"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.insight.series",
                device,
                str(script),
                str(out),
            ],
            cwd=folder,
            env={**environment(seed), **(variables or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode or not out.exists():
            raise RuntimeError(
                f"{script.stem} failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}"
            )
        written = json.loads(out.read_text())
        return Series(tuple(written["levels"]), written["seconds"])


def anonymous_bytes() -> int:
    """Return the anonymous and shared memory of this process and its descendants in bytes.

    It is the sum of ``RssAnon`` and ``RssShmem`` in /proc/PID/status (proc(5)). The resident set is not used,
    because it includes mapped files.
    """
    return sum(_status_bytes(pid) for pid in _family(os.getpid()))


def _family(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []  # the process has just ended
    return [pid, *(one for child in text.split() for one in _family(int(child)))]


def _status_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def _run(device: str, script: str, out: str) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    levels: list[int] = []
    owner = os.getpid()

    def read(*_: Any) -> None:
        if os.getpid() == owner:
            held = torch.cuda.memory_allocated() if device == "cuda" else 0
            levels.append(anonymous_bytes() + held)

    def write() -> None:
        if os.getpid() == owner:
            used = os.times()
            seconds = used.user + used.system + used.children_user + used.children_system
            Path(out).write_text(json.dumps({"levels": levels, "seconds": seconds}))

    register_optimizer_step_post_hook(read)
    atexit.register(write)
    leave = os._exit

    def written(code: int) -> None:
        write()
        leave(code)

    os._exit = written  # type: ignore[assignment] # a script that ends this way runs no atexit function
    run_script(device, script)


if __name__ == "__main__":
    _run(*sys.argv[1:])
