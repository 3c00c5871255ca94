"""The last thing that a run does is explain itself: children that run out of memory, or are killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from memlog.cli.sync import sync
from memlog.events import Alert, Artifact, End, Event, OutOfMemory
from memlog.journal import RunDirectory, list_runs

pytestmark = pytest.mark.integration

LIMITED = """
    import resource
    import memlog

    GIB = 1024**3
    with memlog.init("local") as session:
        for _ in range(3):
            session.step()
        resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB))
        {body}
"""

TORCH = """
    import resource
    import torch
    import memlog

    class Greedy(torch.nn.Module):
        def forward(self, x):
            return x.new_zeros(2**33)

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(Greedy()))
    memlog.init("local", finish_timeout=60)   # unwrapped: seen at exit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.ones(4)).sum().backward()
    optimizer.step()
    resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, 8 * 1024**3))
    model(torch.ones(4))
"""

FOREVER = """
    import sys, time
    import memlog

    session = memlog.init("local")
    for _ in range(30):
        session.step()
    helper = session._live._helper.pid
    print(helper, flush=True)
    time.sleep(120)
"""


def child(tmp_path: Path, program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "MEMLOG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(tmp_path: Path, program: str) -> str:
    """What a child that fails prints as its error."""
    with child(tmp_path, program) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 1, errors
    return errors


def only_run(tmp_path: Path) -> RunDirectory:
    (run,) = list_runs(tmp_path)
    return run


def events(run: RunDirectory) -> Iterator[Event]:
    for file in run.files():
        yield from (entry.event for entry in file.read())


def wait_for_report(run: RunDirectory) -> str:
    report = run.artifacts / "postmortem.md"
    deadline = time.monotonic() + 60
    while not any(isinstance(event, Alert) for event in events(run)):
        assert time.monotonic() < deadline, (run.path / "helper.log").read_text()
        time.sleep(0.1)
    return report.read_text()


def test_a_bytearray_too_large(tmp_path: Path) -> None:
    errors = ended(tmp_path, LIMITED.format(body="bytearray(8 * GIB)"))
    assert errors.rstrip().endswith("MemoryError")
    run = only_run(tmp_path)
    assert f"memlog: how the run ended is explained in {run.path}/artifacts/postmortem.md" in errors
    text = wait_for_report(run)
    assert text.startswith("# Out of memory on the host after step 2\n")
    assert "the limit on the process's address space (ulimit -v)" in text
    assert "| unknown | " in text  # Python does not say how much was asked for
    found = list(events(run))
    assert [event.status for event in found if isinstance(event, End)] == ["failed"]
    assert [event.kind for event in found if isinstance(event, Artifact)] == ["postmortem"]
    (alert,) = [event for event in found if isinstance(event, Alert)]
    assert (alert.level, alert.rule, alert.step) == ("error", "out of memory", 2)


def test_torch_on_the_cpu_names_the_layer(tmp_path: Path) -> None:
    errors = ended(tmp_path, TORCH)
    assert "DefaultCPUAllocator" in errors
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Out of memory on the host after step 0, 32.0 GiB asked for\n")
    assert "It happened in the forward pass, layer: 1.0 (Greedy)." in text
    (failure,) = [e for e in events(only_run(tmp_path)) if isinstance(e, OutOfMemory)]
    assert failure.requested == 2**35
    assert failure.free is not None
    assert failure.free < 8 * 1024**3


def test_one_that_is_survived_is_no_bad_end(tmp_path: Path) -> None:
    body = """
        try:
            bytearray(8 * GIB)
        except MemoryError:
            memlog.finish()
    """
    program = LIMITED.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))
    with child(tmp_path, program) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    kinds = {type(event) for event in events(only_run(tmp_path))}
    assert OutOfMemory in kinds
    assert not kinds & {Alert, Artifact}


def test_an_error_of_another_kind_has_no_report(tmp_path: Path) -> None:
    ended(tmp_path, LIMITED.format(body="raise RuntimeError('shapes do not match')"))
    assert not {type(event) for event in events(only_run(tmp_path))} & {
        OutOfMemory,
        Alert,
        Artifact,
    }


def test_the_helper_explains_a_trainer_that_was_killed(tmp_path: Path) -> None:
    with child(tmp_path, FOREVER) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    text = wait_for_report(only_run(tmp_path))
    assert text.startswith("# Killed")
    assert "after step 29\n" in text
    assert "written from outside, by memlog's helper process" in text
    assert "| 29 | " in text


def test_sync_explains_where_the_helper_died_too(tmp_path: Path) -> None:
    with child(tmp_path, FOREVER) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        os.kill(helper, signal.SIGKILL)
        process.kill()
    run = only_run(tmp_path)
    assert not run.artifacts.exists()
    for _ in range(2):
        CliRunner().invoke(sync, [run.id, "--dir", str(tmp_path)])
    text = wait_for_report(run)
    assert "written from outside, by `memlog sync`" in text
    assert len([event for event in events(run) if isinstance(event, Alert)]) == 1
