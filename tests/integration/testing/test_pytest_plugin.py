"""memlog's plugin for pytest, in runs of pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import memlog

pytestmark = pytest.mark.integration

TRAIN = """
import pytest, torch
from torch import nn

def train(width=64, steps=4):
    model = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMLOG_DIR", "MEMLOG_ENABLED", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)


def run(pytester: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(test_train=TRAIN + tests)
    # In a process of its own: pytester makes a later run in this process import torch again, which crashes.
    return pytester.runpytest_subprocess("-p", "memlog_pytest", *arguments)


def test_limits_pass_and_fail(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.memory(trace_peak="< 2 MiB", growth="none")
@pytest.mark.parametrize("width", [64])
def test_small(width): train(width, steps=12)

@pytest.mark.memory(trace_peak="< 100 KiB")
def test_large(): train()

@pytest.mark.memory(trace_peak="< 2 MiB")
def test_without_steps(): pass

@pytest.mark.memory(trace_peak="< 2 MiB")
def test_that_fails(): assert train() == 5

kept = []

@pytest.mark.memory(growth="none")
def test_leak():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(16):
        kept.append(model(torch.ones(4, 8)).sum())
        kept[-1].backward()
        optimizer.step()
""",
    )
    result.assert_outcomes(passed=1, failed=4)
    text = result.stdout.str()
    assert (
        "\nmemory grew: tensors that keep an autograd graph became more, from step 7 to step"
        in text
    )
    assert re.search(r"the gate 'trace.peak < 100 KiB' failed: run \w+ has \d+\.\d KiB\n", text)
    assert "\nat the traced peak: " in text
    assert "can't be judged: trace.peak is unknown in run" in text
    assert (
        "no step was traced: a step begins with the call of a torch.nn.Module and ends with" in text
    )
    assert "assert train() == 5" in text
    shown = re.search(r"`memlog (show \w+ --dir \S+)` shows the run", text)
    assert shown is not None
    assert "test_train.py::test_large" in memlog(*shown[1].split()).stdout


COMPARED = """
import os

@pytest.mark.memory(vs="baseline +1 %")
@pytest.mark.parametrize("width", [64, 96])
def test_width(width): train(width + int(os.environ.get("MORE", 0)))

@pytest.mark.memory(trace_peak="< 1 KiB")
def test_that_fails(): train()
"""


def test_workers_of_xdist_write_one_baseline(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_train=TRAIN + COMPARED)
    # The path of the option is relative to the working directory, as in other tools.
    arguments = ("-p", "memlog_pytest", "-n", "2", "--memlog-baseline", "memory.json")
    result = pytester.runpytest_subprocess(*arguments, "--memlog-update")
    result.assert_outcomes(passed=2, failed=1)
    file = pytester.path / "memory.json"
    result.stdout.fnmatch_lines([f"memlog: wrote the entries of 2 tests into {file}"])
    trainings = json.loads(file.read_text())["trainings"]
    assert list(trainings) == ["test_train.py::test_width[64]", "test_train.py::test_width[96]"]
    assert all(entry["figures"]["trace.peak"] > 100_000 for entry in trainings.values())

    select = (*arguments, "-k", "width")
    monkeypatch.setenv("MORE", "2")
    result = pytester.runpytest_subprocess(*select)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["the gate 'trace.peak vs baseline +1 %' failed: run * against *"])


def test_the_baseline_can_stand_in_the_configuration(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmemlog_baseline = memory.json\naddopts = --strict-markers -W error")
    select = ("-k", "width and 64")
    run(pytester, COMPARED, "--memlog-update", *select).assert_outcomes(passed=1, deselected=2)
    run(pytester, COMPARED, *select).assert_outcomes(passed=1, deselected=2)


@pytest.mark.parametrize(
    ("marker", "arguments", "says"),
    [
        (
            'trace_peek="< 1 GiB"',
            (),
            "ERROR: test_train.py::test_it: @pytest.mark.memory: a gate can't be read: did you mean",
        ),
        (
            '"< 1 GiB"',
            (),
            "ERROR: test_train.py::test_it: @pytest.mark.memory('< 1 GiB'): name the figure, as in "
            "memory(trace_peak='< 1 GiB')",
        ),
        (
            'vs="baseline +1 %"',
            (),
            "'trace.peak vs baseline +1 %' needs a baseline file: pass --memlog-baseline memory.json",
        ),
        (
            'trace_peak="< 1 GiB"',
            ("--memlog-update",),
            "ERROR: --memlog-update needs a file: pass --memlog-baseline memory.json",
        ),
    ],
)
def test_a_mistake_says_what_to_do(
    pytester: pytest.Pytester, marker: str, arguments: tuple[str, ...], says: str
) -> None:
    result = run(pytester, f"@pytest.mark.memory({marker})\ndef test_it(): train()", *arguments)
    assert result.ret != 0
    assert says in result.stdout.str() + result.stderr.str()


def test_a_session_of_the_tests_own_is_refused(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import memlog

@pytest.mark.memory(trace_peak="< 1 GiB")
def test_begins_one(tmp_path):
    with memlog.init("local", dir=tmp_path): train()

@pytest.fixture
def running(tmp_path):
    with memlog.init("local", dir=tmp_path) as session: yield session

@pytest.mark.memory(trace_peak="< 1 GiB")
def test_has_one(running): train()

def test_unmarked(running):
    train()
    assert running.enabled
""",
    )
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        ["the test began or ended a memlog session itself*", "a memlog session is running already*"]
    )


def test_switched_off_it_judges_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLOG_ENABLED", "0")
    tests = '@pytest.mark.memory(trace_peak="< 1 KiB")\ndef test_it(): train()'
    run(pytester, tests).assert_outcomes(passed=1)


def test_without_marked_tests_memlog_is_not_imported(pytester: pytest.Pytester) -> None:
    """The marker of the same name may be the user's own."""
    pytester.makepyfile(
        """
import sys
import pytest

@pytest.mark.memory
def test_it(): assert not [name for name in sys.modules if name.split(".")[0] in ("memlog", "torch")]
"""
    )
    result = pytester.runpytest_subprocess("-p", "memlog_pytest", "--strict-markers")
    result.assert_outcomes(passed=1)
    result = pytester.runpytest_subprocess("-p", "memlog_pytest", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.memory(trace_peak=*"])


def test_the_distribution_registers_it() -> None:
    """In the metadata, because an older editable install lacks the entry point."""
    settings = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nmemlog_pytest = "memlog_pytest"\n' in settings
    done = subprocess.run(
        [sys.executable, "-c", "import memlog_pytest, sys; print('memlog' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "False\n"
