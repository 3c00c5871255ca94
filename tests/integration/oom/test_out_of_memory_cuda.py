"""Ways to run out of a CUDA device's memory: the first line that memlog prints, and its advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from support import child
from support.ways_out_of_memory import PREFACE, WAYS, Way

from memlog.artifacts.snapshots import read_snapshot
from memlog.cli.main import cli
from memlog.events import OutOfMemory, Sample, Trace
from memlog.facts.oom_cause import OUT_OF_MEMORY
from memlog.journal import RunDirectory, list_runs
from memlog.reports import Summary, summarize

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda

PAGE = Path(__file__).parents[3] / "docs/project/out-of-memory.md"
HOLD = (
    "import torch; x = torch.empty({} * 2**20, dtype=torch.uint8, device='cuda'); print(1, flush=True); "
    "input()"
)
_SIZES = re.compile(r"\d[\d.,]*(?: [KMGT]iB)?")


class Ended(NamedTuple):
    run: RunDirectory
    summary: Summary
    printed: list[str]
    """Lines that memlog printed."""
    errors: str
    code: int

    @property
    def report(self) -> str:
        file = self.run.artifacts / "postmortem.md"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def failures(self) -> list[OutOfMemory]:
        return [event for event in self.run.events() if isinstance(event, OutOfMemory)]


@contextmanager
def other_process(size: int | None, environment: dict[str, str]) -> Iterator[None]:
    """Let another process hold so many MiB of the device; ``None``: no process."""
    if size is None:
        yield
        return
    command, pipe = [sys.executable, "-c", HOLD.format(size)], subprocess.PIPE
    everything = {**os.environ, **environment}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=everything)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.communicate(b"\n", timeout=60)


def run(folder: Path, program: str, other: int | None = None, **environment: str) -> Ended:
    if torch.cuda.get_device_name() != "Fake CUDA device":
        pytest.skip("fills a whole device: `make cuda-tests` simulates a small one")
    small = {"FAKE_CUDA_MEMORY": "1GiB", "FAKE_CUDA_COPY": "4k"}
    environment = {**small, "FAKE_CUDA_STATE": str(folder / "devices"), **environment}
    with other_process(other, environment):
        # torch reads the allocator's settings as it is imported.
        fork = "PYTORCH_ALLOC_CONF" not in environment
        script = PREFACE + textwrap.dedent(program)
        process = child.start(script, folder, fork=fork, **environment)
        _, errors = process.communicate(timeout=120)
    printed = [line for line in errors.splitlines() if line.startswith("memlog: ")]
    (found,) = list_runs(folder / "memlog_runs")
    return Ended(found, summarize(found), printed, errors, process.returncode)


def without_sizes(text: str) -> str:
    return _SIZES.sub("#", text)


def documented() -> dict[str, str]:
    """First lines by way, from the table of the page."""
    text = PAGE.read_text(encoding="utf-8").partition("| what ran out")[2]
    rows = (line.split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows}


def first_line(ended: Ended) -> str:
    """Return the first line on the run's end, which must be the same everywhere."""
    alerts = [alert.title for alert in ended.summary.alerts if alert.rule == OUT_OF_MEMORY]
    if not alerts:
        return ended.summary.verdict.partition(" Too few steps")[0].removesuffix(".")
    (title,) = alerts
    assert ended.report.splitlines()[0] == f"# {title}"
    assert ended.summary.verdict.startswith(f"{title}. ")
    assert any(line.startswith(f"memlog: {title}.") for line in ended.printed)
    return title


@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_the_first_line_names_the_cause(tmp_path: Path, way: Way) -> None:
    ended = run(tmp_path, way.program, way.other_process, **way.environment)
    assert ended.code == 1, ended.errors
    line = first_line(ended)
    assert without_sizes(line) == without_sizes(documented()[way.name])
    for text in way.also:
        assert text in ended.report
    for text in way.never:
        assert text not in ended.report
    settings = way.environment.get("PYTORCH_ALLOC_CONF", "")
    for failure in ended.failures:
        if failure.state is not None:
            assert failure.state.expandable is ("expandable_segments:True" in settings)
    assert not ended.summary.health.faults


def test_the_table_has_all_ways() -> None:
    assert [*documented()] == [way.name for way in WAYS]


def test_a_search_for_the_batch_size_that_succeeds_is_no_failure(tmp_path: Path) -> None:
    program = """
        model, optimizer = begin()
        batch = 262_144
        while True:
            try:
                step(model, optimizer, batch)
                break
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                batch //= 2
        memlog.finish()
    """
    ended = run(tmp_path, program)
    assert ended.code == 0, ended.errors
    tried = [262_144 // 2**attempt for attempt in range(len(ended.failures))]
    assert ended.summary.survived_batch_sizes == tried
    assert "Out of memory" not in ended.summary.verdict
    assert not any("Out of memory" in line for line in ended.printed)
    assert not ended.report
    assert len(ended.failures) >= 2


def test_the_size_of_a_batch_that_no_variable_has_is_known_in_the_backward_pass(
    tmp_path: Path,
) -> None:
    program = """
        model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memlog.init("local", finish_timeout=60)

        def train(size):
            optimizer.zero_grad()
            model(torch.randn(size, 512, device="cuda")).mean().backward()
            optimizer.step()

        train(8)
        for size in (32_768, 20_000):
            try:
                train(size)
            except torch.OutOfMemoryError:
                print("caught", size)
        train(8)
    """
    ended = run(tmp_path, program)
    assert ended.code == 0, ended.errors
    assert [event.phase for event in ended.failures] == ["forward", "backward"]
    assert ended.summary.survived_batch_sizes == [32_768, 20_000]


def test_a_step_that_was_repeated_after_a_failure_is_not_traced(tmp_path: Path) -> None:
    program = """
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        memlog.init("local", model=model, layers=True, finish_timeout=60)
        for batch in (262_144, 131_072, 65_536):
            try:
                step(model, optimizer, batch)
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
        for _ in range(5):
            step(model, optimizer, 1024)
    """
    ended = run(tmp_path, program)
    traced = [event.step for event in ended.run.events() if isinstance(event, Trace)]
    assert traced[0] == 1
    assert ended.summary.traced.worst_step in traced
    number = len(ended.failures)
    assert ended.summary.survived_failures == number >= 2
    assert (ended.summary.survived_first_step, ended.summary.survived_last_step) == (0, 0)
    shown = CliRunner().invoke(
        cli, ["show", str(ended.run.id), "--dir", str(ended.run.path.parent)]
    )
    assert f"{number} allocations failed and were survived at step 0" in shown.output


@pytest.mark.parametrize(
    ("after", "code"),
    [("sys.exit(0)", 0), ("step(model, optimizer, 64); sys.exit(3)", 3), ("pass", 0)],
    ids=["without an error code", "after a complete step", "at the end of the script"],
)
def test_an_exit_that_tells_of_no_lasting_failure_gets_no_report(
    tmp_path: Path, after: str, code: int
) -> None:
    program = f"""
        import sys
        model, optimizer = begin()
        try:
            step(model, optimizer, 131_072)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        {after}
    """
    ended = run(tmp_path, program)
    assert ended.code == code, ended.errors
    assert ended.failures
    assert not ended.report
    assert ended.summary.status == "finished"


def test_an_exit_after_the_failure_was_handled_gets_a_report(tmp_path: Path) -> None:
    program = """
        import sys
        original = sys.exit
        model, optimizer = begin()
        failed = False
        try:
            step(model, optimizer, 131_072)
        except torch.OutOfMemoryError:
            failed = True
        assert sys.exit is not original
        if failed:
            sys.exit("no memory")
    """
    ended = run(tmp_path, program)
    assert ended.code == 1, ended.errors
    assert "no memory" in ended.errors
    assert first_line(ended).startswith(
        "Out of memory on cuda0 after step 2, 256.0 MiB requested: the f"
    )
    assert "It led to the error" not in ended.report
    assert ended.summary.status == "failed"


def test_a_search_that_ends_without_a_batch_size_ran_out_of_memory(tmp_path: Path) -> None:
    program = """
        from accelerate.utils import find_executable_batch_size
        model, optimizer = begin()
        @find_executable_batch_size(starting_batch_size=2)
        def train(size):
            step(model, optimizer, 131_072 * size)
        train()
    """
    line = first_line(run(tmp_path, program))
    assert line.startswith("Out of memory on cuda0 after step 2, 256.0 MiB requested: the forward")


@pytest.mark.parametrize("of_the_users", [False, True])
def test_a_history_of_the_users_is_left_out_of_the_snapshot(
    tmp_path: Path, of_the_users: bool
) -> None:
    record = "torch.cuda.memory._record_memory_history()" if of_the_users else ""
    program = f"""
        {record}
        begin()
        block(2048)
    """
    ended = run(tmp_path, program)
    snapshot = read_snapshot(ended.run.artifacts / "out-of-memory.pickle")
    assert snapshot["segments"]
    assert snapshot["device_traces"] == ([] if of_the_users else [[]])
    assert ended.failures[0].state.largest_unused is not None
    assert not ended.summary.health.faults


def test_the_asynchronous_allocator_is_no_fault(tmp_path: Path) -> None:
    program = """
        begin()
        block(2048)
    """
    ended = run(tmp_path, program, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert not ended.summary.health.faults
    assert not any("failed (" in line for line in ended.printed)
    assert first_line(ended) == (
        "Out of memory on cuda0 after step 2, 2.0 GiB requested: the whole device has only 1.0 GiB"
    )
    (failure,) = ended.failures
    assert (failure.limit, failure.requested) == (2**30, 2**31)


def test_a_process_that_the_program_started_passes_its_failure_on(tmp_path: Path) -> None:
    program = """
        def work(rank):
            torch.empty(2**31, dtype=torch.uint8, device="cuda")
        if __name__ == "__main__":
            begin()
            torch.multiprocessing.spawn(work, nprocs=1)
    """
    line = first_line(run(tmp_path, program))
    assert line == (
        "Out of memory in Process 0 of torch.multiprocessing.spawn after step 2, 2.0 GiB requested"
    )


def test_several_devices_are_told_apart_in_backward(tmp_path: Path) -> None:
    """The observer runs on autograd's thread of the second device."""
    program = """
        from torch.utils.checkpoint import checkpoint
        class Halves(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = mlp(device="cuda:0"), mlp(layers=8, device="cuda:1")
            def forward(self, x):
                return checkpoint(self.second, self.first(x).to("cuda:1"), use_reentrant=False)
        model, optimizer = begin(Halves(), layers=True, budget=1)
        x = torch.randn(50_000, 512, device="cuda:0")
        model(x).square().mean().backward()
    """
    devices = {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_MEMORY": "4GiB", "FAKE_CUDA_MEMORY_1": "1GiB"}
    ended = run(tmp_path, program, **devices)
    line = first_line(ended)
    assert line.startswith("Out of memory on cuda1 after step 2, 98.0 MiB requested: the backward")
    assert {(each.name, each.shape) for each in ended.failures[0].inputs} >= {("x", (50_000, 512))}
    # The device with most of the model is traced.
    assert "From the newest traced step, step 2 (native)" in ended.report
    assert "| second.0 | 4.0 MiB |" in ended.report


SHARES = """
    import time
    from pathlib import Path

    model, optimizer = begin()
    while not Path("go").exists():
        step(model, optimizer, 64)
        time.sleep(0.05)
    block(400)
"""


def test_memory_that_another_process_takes_during_the_run_is_told(tmp_path: Path) -> None:
    if torch.cuda.get_device_name() != "Fake CUDA device":
        pytest.skip("fills a whole device: `make cuda-tests` simulates a small one")
    small = {"FAKE_CUDA_MEMORY": "1GiB", "FAKE_CUDA_STATE": str(tmp_path / "devices")}
    process = child.start(PREFACE + textwrap.dedent(SHARES), tmp_path, **small)
    found = sampled_alone(tmp_path)
    with other_process(700, small):
        (tmp_path / "go").touch()
        process.communicate(timeout=120)
    ended = Ended(found, summarize(found), [], "", process.returncode)
    told = re.search(r"During the run, the memory of other processes .*", ended.report)
    assert told is not None
    assert without_sizes(told[0].replace("0 bytes", "0 B")) == without_sizes(
        "During the run, the memory of other processes on cuda0 grew from 0 B at step 3 to 700.0 MiB. "
        "PyTorch's allocator of this process held 42.0 MiB after the first step and 42.0 MiB at the failure."
    )


def sampled_alone(folder: Path) -> RunDirectory:
    """Return the run as soon as it has a sample in which no other process uses the device."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for found in list_runs(folder / "memlog_runs"):
            samples = [each for each in found.events() if isinstance(each, Sample)]
            if any(use.other_processes == 0 for each in samples for use in each.devices):
                return found
        time.sleep(0.1)
    raise AssertionError("the helper process has published no sample of the device")


def test_a_device_that_shares_the_hosts_memory_has_what_the_machine_can_give(
    tmp_path: Path,
) -> None:
    program = """
        model, optimizer = begin()
        step(model, optimizer, 131_072)
    """
    ended = run(tmp_path, program, 300, FAKE_CUDA_INTEGRATED="1")
    assert ended.summary.run.devices["cuda0"].shares_host
    (failure, *_) = ended.failures
    assert failure.state is not None
    assert failure.state.shares_host
    assert failure.state.outside is None
    # The machine can give more. The driver's figure would lack the other process's 300 MiB.
    assert failure.free == 2**30 - (failure.reserved or 0)
    assert "cuda0 shares the host's memory" in ended.report
    shown = CliRunner().invoke(cli, ["show", ended.run.id, "--dir", str(ended.run.path.parent)])
    assert "Fake CUDA device, 1.0 GiB, shares the host's memory" in shown.output
    assert not [name for name in ended.summary.metrics if "device_used" in name]
