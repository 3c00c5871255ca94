"""Count the instructions that memlog takes, which needs no quiet machine.

``python -m benchmarks.instructions [--write]`` runs small programs under callgrind, which counts each
instruction that a thread executes outside the kernel. The counts of two runs differ by less than 1 %, also on
a busy machine. ``--write`` stores them in ``benchmarks/instructions.json`` and in the page of benchmarks, as
``make bench`` does. ``tests/slow/test_instructions.py`` fails if a count has changed by more than 2 %: then
find the reason, and store the new counts with the change.

Another Python, processor or C library executes other instructions for the same work. So the test compares
each count with that of *lean*, which reads, encodes and stores as memlog does, and has no code of memlog.

Work that is due by the clock (a look at the helper process, at inputs, at devices, a health event) is left
out, because callgrind slows a program down fifty times. The helper process and other threads are not counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

FILE = Path(__file__).with_suffix(".json")
_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs" / "project" / "benchmarks.md"
_BEGIN, _END = "<!-- instructions -->", "<!-- end of instructions -->"
TOLERANCE = 0.02
LEAN, PSUTIL = "lean", "psutil"
STEP, CHANGING = "steady step", "steady step, other memory than before"
WITH_TORCH = "steady step, torch's hooks included"
IMPORT, SHOW = "import memlog", "show, for each step of the run"
LABELS = {
    LEAN: "*lean*: reads, encodes and stores, and nothing else",
    PSUTIL: "psutil's `memory_info().rss`",
    STEP: "memlog, a steady step",
    CHANGING: "memlog, a step after which the process has other memory than before",
    WITH_TORCH: "memlog, a steady step with the calls of torch's hooks",
    IMPORT: "`import memlog`",
    SHOW: "`memlog show`, for each step of the run",
}
_MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_IMPORT = f"""
import ctypes, sys
marks = ctypes.CDLL(sys.argv[1])
marks.begin()
import memlog
marks.end({IMPORT.encode()!r})
"""
_REPEATED = 2_000
"""Number of steps that are counted: ten checks of the journal's file, four of its windows."""
_FIRST = 1_500
"""Number of steps before these, in which the interpreter adapts its code."""
_SHOWN = {"short": 1_000, "long": 4_000}
"""Number of steps of the runs that are shown."""
_NEVER = 2**62


def missing() -> str | None:
    """Return what this machine lacks to count instructions; ``None``: nothing."""
    needed = {"valgrind": "valgrind", "cc": "gcc and libc6-dev"}
    packages = [package for program, package in needed.items() if shutil.which(program) is None]
    return f"install {' and '.join(packages)} (apt-get install)" if packages else None


def measure(*, with_torch: bool) -> dict[str, float]:
    """Count the instructions of one import, and of one of each other piece of work.

    Args:
        with_torch: True: count steps of a real optimizer, too. Importing torch takes half a minute then.
    """
    with tempfile.TemporaryDirectory(prefix="memlog-instructions-") as name:
        folder = Path(name)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "marks.so"],
            input=_MARKS.encode(),
            check=True,
        )
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        subprocess.run(
            [sys.executable, "-c", "import memlog"], env=environment, check=True
        )  # compiles
        found = _count(folder, "-c", _IMPORT)
        found |= _count(folder, "-m", "benchmarks.instructions", "--of", "steps")
        found[CHANGING] -= found.pop("change")
        shown = _count(folder, "-m", "benchmarks.instructions", "--of", "show")
        found[SHOW] = (shown["long"] - shown["short"]) / (_SHOWN["long"] - _SHOWN["short"])
        if with_torch:
            steps = _count(folder, "-m", "benchmarks.instructions", "--of", "torch")
            found[WITH_TORCH] = steps["with memlog"] - steps["bare"]
    return found


def _count(folder: Path, *program: str) -> dict[str, float]:
    """Run a program under callgrind, and return the main thread's count of each marked part."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MEMLOG_")}
        settings = {
            "PYTHONPATH": str(_ROOT),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(
            [
                # The program is a child of a small shell, not of a process that has loaded torch: it would
                # inherit the large `ru_maxrss` of that one, and memlog reads more while it has (see
                # `memlog.probes.process`).
                *("sh", "-c", '"$@" || exit', "sh"),
                # On one processor: the kernel counts pages for each one, so that its figures change in a
                # step in which the process moves. Such a step is not a steady one.
                *("taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))),
                *("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"),
                *("--separate-threads=yes", "--callgrind-out-file=counts"),
                *(sys.executable, *program, str(folder / "marks.so")),
            ],
            cwd=directory,
            env={**clean, **settings},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        # One file for each mark and thread. The main thread has the number 1.
        return dict(_read(path) for path in sorted(Path(directory).glob("counts.*-01")))


def _read(path: Path) -> tuple[str, float]:
    """Return the name of a mark, and its count."""
    lines = path.read_text().splitlines()
    [name] = [each.partition("Client Request: ")[2] for each in lines if "Client Request: " in each]
    [total] = [each.split()[1] for each in lines if each.startswith("totals:")]
    name, _, repeated = name.partition("/")
    return name, int(total) / int(repeated or 1)


class _Counter:
    """Marks for callgrind around repeated work."""

    def __init__(self, library: str) -> None:
        import ctypes

        self._marks = ctypes.CDLL(library)

    def count(self, name: str, work: Callable[[], object], times: int = _REPEATED) -> None:
        self._marks.begin()
        for _ in range(times):
            work()
        self._marks.end(f"{name}/{times}".encode())


def _steps(counter: _Counter) -> None:
    """Count steps without torch: memlog's hooks are called as torch calls them around an optimizer's step."""
    import psutil

    from benchmarks.step import Lean

    lean, process = Lean(), psutil.Process()
    for name, work in ((LEAN, lean), (PSUTIL, lambda: process.memory_info().rss)):
        _repeat(work)
        counter.count(name, work)

    class Optimizer:  # with what memlog reads of one
        param_groups = ({"params": (SimpleNamespace(device=SimpleNamespace(type="cpu")),)},)

    optimizer, session = Optimizer(), _Session()
    clock, mapped = session.recording._autolog.clock, list[mmap.mmap]()

    def step() -> None:
        clock.begin(optimizer, (optimizer,), {})
        clock.end(optimizer, (optimizer,), {})

    def change() -> None:
        """Map a page, or unmap it, so that the kernel's figures differ from those before."""
        if mapped:
            mapped.pop().close()
        else:
            mapped.append(mmap.mmap(-1, mmap.PAGESIZE))

    def changing_step() -> None:
        change()
        step()

    session.settle(step)
    counter.count(STEP, step)
    _repeat(changing_step)
    counter.count("change", change)
    counter.count(CHANGING, changing_step)


def _torch_steps(counter: _Counter) -> None:
    """Count steps of a real optimizer, without memlog and with it."""
    import torch

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    step = torch.optim.SGD([parameter], lr=0.01).step
    _repeat(step)
    counter.count("bare", step)
    _Session().settle(step)
    counter.count("with memlog", step)


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(_FIRST):
        work()


class _Session:
    """A session with only the work of each step. It uses private attributes."""

    def __init__(self) -> None:
        import memlog

        session = memlog.init("local", config={"memlog": {"quiet": True}})
        assert session._live is not None
        self.recording = session._live
        self.recording.batches.tell_size = None  # optimizers here have no state to measure

    def settle(self, step: Callable[[], object]) -> None:
        """Make steps until the interpreter has adapted its code."""
        step()  # the first one reads devices, and publishes the run's parameters
        recording, batches = self.recording, self.recording.batches
        # The helper process follows the steps a second after the start. Here it would see the memory of
        # callgrind grow, and begin searches.
        recording._requests.searches.helper_follows()
        if recording._helper.pid is not None:
            os.kill(recording._helper.pid, signal.SIGKILL)
        batches.health.due = batches.helper_check_due = _NEVER
        batches._heap_due = batches._read_devices_at = _NEVER
        recording._inputs.next_look = recording._inputs._begun = _NEVER
        _repeat(step)


def _show(counter: _Counter) -> None:
    """Count ``memlog show`` of two runs. Their difference is what the further steps take."""
    from memlog.cli.main import cli

    show = partial(cli, standalone_mode=False)
    for name, steps in {"first": 10, **_SHOWN}.items():
        _write_run(Path("runs", name), steps)
    show(["show", "first", "--dir", "runs"])  # imports
    for name in _SHOWN:
        counter.count(name, partial(show, ["show", name, "--dir", "runs"]), 1)


def _write_run(folder: Path, steps: int) -> None:
    """Write the journal of a run's training process."""
    from memlog._internal.diagnostics import Diagnostics
    from memlog.events import Batch, End, Run
    from memlog.journal import JournalWriter

    folder.mkdir(parents=True)
    begun = 1_700_000_000_000_000
    writer = JournalWriter(
        folder, run=folder.name, role="trainer", begun_us=begun, diagnostics=Diagnostics()
    )
    writer.append(Run(time_us=begun, name=None, project=None, backends=("local",), settings={}))
    for step in range(steps):
        rss = 2**30 + step % 7 * 2**16
        private = (2**31, None)
        writer.append(
            Batch(
                begun + step * 1000,
                step,
                rss,
                2**30 + 2**20,
                "watermark",
                (),
                rss - 2**27,
                0,
                private,
            )
        )
    writer.append(End(begun + steps * 1000, "finished"))
    writer.close()


_PARTS = {"steps": _steps, "show": _show, "torch": _torch_steps}


def section(counts: Mapping[str, float]) -> str:
    """Return a table of counts between marks, for the documentation."""
    rows = [f"| {label} | {counts[name]:,.0f} |" for name, label in LABELS.items()]
    lines = [
        _BEGIN,
        "",
        "Instructions outside the kernel, as callgrind counts them, also on a busy machine "
        "(`python -m benchmarks.instructions --write` updates this table). A test fails if one has changed "
        f"by more than {TOLERANCE * 100:g} %:",
        "",
        "| | instructions |",
        "|---|---|",
        *rows,
        "",
        _END,
    ]
    return "\n".join(lines)


def differences(
    committed: Mapping[str, float], counts: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return the expected and the found counts that differ by more than `TOLERANCE`.

    A count is expected to differ from the committed one as that of *lean* does.
    """
    scale = counts[LEAN] / committed[LEAN]
    expected = {name: committed[name] * scale for name in counts}
    return {
        name: (expected[name], found)
        for name, found in counts.items()
        if abs(found / expected[name] - 1) > TOLERANCE
    }


def counted() -> dict[str, float]:
    """Return `measure` with torch.

    Raises:
        SystemExit: This machine lacks a program for that.
    """
    if (remedy := missing()) is not None:
        sys.exit(f"can't count instructions: {remedy}")
    return measure(with_torch=True)


def store(counts: Mapping[str, float]) -> None:
    """Write counts to the file that the test reads."""
    whole = {name: round(count) for name, count in counts.items()}
    FILE.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help=f"also write {FILE.name} and {PAGE.name}"
    )
    parser.add_argument("--of", choices=_PARTS, help=argparse.SUPPRESS)
    parser.add_argument("library", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        _PARTS[options.of](_Counter(options.library))
        sys.stdout.flush()
        os._exit(0)  # nothing of the session needs to end
    counts = counted()
    sys.stdout.write(section(counts) + "\n")
    if options.write:
        store(counts)
        head, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(head + section(counts) + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
