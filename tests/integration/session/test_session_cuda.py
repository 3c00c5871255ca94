"""A session on devices: their figures at each step and in phases, and what other processes hold."""

import subprocess
import textwrap
from pathlib import Path

import pytest
from support import child, device_figures, devices
from support.launching import Recorded, recorded

from memlog._internal.terminal import MIB
from memlog.events import DeviceUse, Phase, PinnedMemory, Sample
from memlog.reports import summarize

pytestmark = [pytest.mark.integration, pytest.mark.cuda]

STEPS = (
    device_figures.OWN_FIGURES
    + """
    import memlog

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = f"cuda:{torch.cuda.device_count() - 1}"
            self.first = torch.nn.Linear(512, 512).cuda()
            self.second = torch.nn.Linear(512, 512).to(self.last)

        def forward(self, batch):
            return self.second(self.first(batch).relu().to(self.last))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    memlog.init("local")
    for number in range(1, 9):
        model(torch.ones(512 * (number if number < 6 else 1), 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    memlog.finish()
"""
)


def the_run(folder: Path) -> Recorded:
    (run,) = recorded(folder / "memlog_runs")
    return run


def test_each_step_has_the_allocators_figures(tmp_path: Path) -> None:
    child.run(STEPS, tmp_path)
    steps = device_figures.check_figures(the_run(tmp_path), tmp_path)
    sources = [step.devices[0].peak_source for step in steps]
    assert sources[1:5] == ["exact"] * 4  # each batch is larger than those before
    assert sources[6:] == ["watermark"] * 2


def test_each_of_two_devices_has_its_figures(tmp_path: Path) -> None:
    child.run(STEPS, tmp_path, **devices.need_two())
    steps = device_figures.check_figures(the_run(tmp_path), tmp_path)
    assert {tuple(one.name for one in step.devices) for step in steps} == {("cuda0", "cuda1")}


WORKERS = (
    device_figures.OWN_FIGURES
    + """
    import memlog

    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    memlog.init("local")
    data = torch.ones(64, 512)
    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2, pin_memory=True)
    for epoch in range(2):
        for batch in loader:   # its workers are forks of a process that uses the device
            model(batch.cuda(non_blocking=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memlog.finish()
"""
)


def test_workers_that_are_forks_change_nothing(tmp_path: Path) -> None:
    child.run(WORKERS, tmp_path)
    run = the_run(tmp_path)
    assert len(device_figures.check_figures(run, tmp_path)) == 8
    assert run.status == "finished"


PHASES = """
    import torch

    import memlog

    def held(mebibytes):
        return torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")

    kept = held(10)
    memlog.init("local")
    with memlog.phase("rollout"):
        passing = held(100)
        del passing
    with memlog.phase("update"):
        with memlog.phase("inner"):
            passing = held(300)
            del passing
        more = held(20)
    with memlog.phase("idle"):
        passing = held(50)
        del passing
    memlog.finish()
"""


def test_each_phase_has_its_own_peak_on_the_device_and_the_counter_is_not_reset(
    tmp_path: Path,
) -> None:
    child.run(PHASES, tmp_path)
    phases = [event for event in the_run(tmp_path).events if isinstance(event, Phase)]
    found = {}
    for phase in phases:
        (device,) = phase.devices
        assert device.name == "cuda0"
        found[phase.label] = device
    assert {label: (one.allocated or 0) // MIB for label, one in found.items()} == {
        "rollout": 10,
        "inner": 10,
        "update": 30,
        "idle": 30,
    }
    exact = {label: one.peak for label, one in found.items() if one.peak_source == "exact"}
    assert exact == {"rollout": 110 * MIB, "inner": 310 * MIB, "update": 310 * MIB}
    assert phases[-1].highest["cuda0"] == 30 * MIB  # its peak of 80 MiB is below the counter's


NEIGHBOUR = """
    import sys

    import torch

    kept = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
    sys.stdin.read()
"""

BESIDE_IT = """
    import time

    import torch

    import memlog

    kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    session = memlog.init("local")
    end = time.monotonic() + 4
    while time.monotonic() < end:
        session.step()
        time.sleep(0.02)
    memlog.finish()
"""


def test_what_other_processes_hold_is_told_apart(tmp_path: Path) -> None:
    if not devices.simulated():
        pytest.skip("other processes may use the GPU")
    folder, pipe = tmp_path / "neighbour", subprocess.PIPE
    folder.mkdir()
    with child.start(NEIGHBOUR, folder, stdin=pipe) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "held\n"
        child.run(BESIDE_IT, tmp_path)
        neighbour.kill()
    samples = [event for event in the_run(tmp_path).directory.events() if isinstance(event, Sample)]
    (found,) = {sample.devices for sample in samples if sample.devices}
    assert found == (DeviceUse("cuda0", 700 * MIB, 600 * MIB, 600 * MIB),)
    run = the_run(tmp_path)
    assert summarize(run.directory).peaks["cuda0.other_processes"].bytes == 600 * MIB


PINS = """
    import torch

    import memlog

    session = memlog.init("local")
    tensors = [torch.empty(1, device="cuda")]
    for step in range(3):
        session.step()
    if PINS:
        tensors.append(torch.empty(33 << 20, dtype=torch.uint8, pin_memory=True))
        del tensors[-1]
    memlog.finish()
"""


def test_pinned_memory_has_metrics_and_a_peak(tmp_path: Path) -> None:
    child.run(f"PINS = True\n{textwrap.dedent(PINS)}", tmp_path)
    summary = summarize(the_run(tmp_path).directory)
    found = {
        name.rpartition("/")[2]: metric.last
        for name, metric in summary.metrics.items()
        if "pinned" in name
    }
    assert found == {"pinned_mib": 64.0, "pinned_in_use_mib": 0.0, "pinned_peak_mib": 64.0}
    assert (summary.peaks["host.pinned"].bytes, summary.peaks["host.pinned"].step) == (64 * MIB, 2)


def test_a_run_that_pins_nothing_has_no_event_about_it(tmp_path: Path) -> None:
    child.run(f"PINS = False\n{textwrap.dedent(PINS)}", tmp_path)
    events = the_run(tmp_path).directory.events()
    assert not [event for event in events if isinstance(event, PinnedMemory)]
