"""The exercise, run as a user runs it on each kind of device, and the pages that show its lines on a CPU."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support import child, devices, hyco, pages

from memlog.artifacts.snapshots import read_snapshot

pytest.importorskip("torch")
# A processor without AVX-512 takes ten times as long for a step in bfloat16.
AT_MOST = 800
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(AT_MOST + 60)]

MIB = r"([\d.]+) MiB"

only_on_the_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    return tmp_path_factory.mktemp(device)


def run(folder: Path, program: str, *arguments: str) -> str:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if folder.name.startswith("cpu") else {}
    path = hyco.EXAMPLES / program
    environment = hyco.environment(OMP_NUM_THREADS="1", **hidden)
    done = child.run_program(
        path, *arguments, directory=folder, environment=environment, timeout=AT_MOST
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, str]:
    """Output of each of the four parts."""
    printed = run(folder, "memory_exercise.py")
    found = re.findall(r"^== Part \d: .*?(?=^== |\Z)", printed, re.MULTILINE | re.DOTALL)
    return dict(zip(("profile", "snapshot", "phases", "compare"), found, strict=True))


@pytest.mark.seed(255, 259, 260, 261, 272, 280)
def test_the_profilers_table_names_what_allocates_most(parts: dict[str, str], device: str) -> None:
    no_gpu = "There is no GPU: the profiler watches the CPU."
    assert (no_gpu in parts["profile"]) == (device == "cpu")
    assert f"Self {device.upper()} Mem" in parts["profile"]
    sizes = re.findall(r"aten::\w+ .* ([\d.]+) MB +\d+ *$", parts["profile"], re.MULTILINE)
    assert len(sizes) > 5
    assert [float(size) for size in sizes] == sorted(map(float, sizes), reverse=True)
    assert "aten::mm" in parts["profile"]


@pytest.mark.seed(135, 259, 262, 263, 264, 265, 281)
def test_a_snapshot_and_its_picture_are_there(
    parts: dict[str, str], folder: Path, device: str
) -> None:
    assert "memory.html: the picture of memory_snapshot.pkl" in parts["snapshot"]
    history = read_snapshot(folder / "memory_snapshot.pkl")["device_traces"][0]
    assert {"alloc", "free_completed"} <= {entry["action"] for entry in history}
    page = (folder / "memory.html").read_text(encoding="utf-8")
    assert "at the peak" in page
    assert page.count("<path ") > 50
    if device == "cpu":
        assert history[-1]["action"] != "free_requested"
        assert "block2" in page


@pytest.mark.seed(256, 258, 266, 267, 268, 273)
def test_the_memory_is_shown_phase_by_phase(parts: dict[str, str]) -> None:
    line = r"^After (\w+): \{'allocated': ([\d.]+), 'reserved': (\S+), 'max_allocated': ([\d.]+)\}$"
    found = re.findall(line, parts["phases"], re.MULTILINE)
    assert [name for name, *_ in found] == ["forward", "backward", "optimizer", "zero_grad"]
    allocated = {name: float(size) for name, size, *_ in found}
    highest = [float(size) for *_, size in found]
    assert allocated["forward"] > 4 * allocated["backward"] > 4 * allocated["zero_grad"]
    assert highest == sorted(highest)
    assert "The peak lies in: backward" in parts["phases"]
    assert "Left behind by a step: 0 bytes" in parts["phases"]


@pytest.mark.seed(257, 270, 271, 274, 275, 282, 283)
def test_the_table_is_filled_in_and_checkpointing_saves_over_30_percent(
    parts: dict[str, str],
) -> None:
    row = rf"^\| ([+\w ]+?) +\| +{MIB} \| +(?:(\d+)%)? \| +(\d+) ms \|$"
    table = re.findall(row, parts["compare"], re.MULTILINE)
    assert [name for name, *_ in table] == ["Baseline", "+ Checkpointing", "+ AMP", "+ Both"]
    baseline, checkpointed, amp, both = (float(peak) for _, peak, *_ in table)
    assert checkpointed < 0.7 * baseline
    assert both < amp < 0.75 * baseline
    assert both < checkpointed
    assert all(int(time) > 0 for *_, time in table)
    assert "exit code 0" in parts["compare"]  # the gate: memlog compare … --fail-if "… > -30%"
    assert "Peak memory reduced by more than 30%: yes" in parts["compare"]


def test_what_advise_predicts_from_the_baseline_is_what_the_change_then_takes(
    parts: dict[str, str], device: str
) -> None:
    pattern = rf"^(`torch.+): {MIB} \(measured: ([\d.]+)\)$"
    hints = re.findall(pattern, parts["compare"], re.MULTILINE)
    # A trace of a device has no types of storages, from which autocast is predicted.
    changes = ["`torch.utils.checkpoint`", *(["`torch.autocast"] if device == "cpu" else [])]
    assert [what.partition("(")[0].split()[0] for what, *_ in hints] == changes
    assert "`block1`, `block2`" in hints[0][0]
    for _, predicted, measured in hints:
        assert float(predicted) == pytest.approx(float(measured), rel=0.1)


@pytest.mark.seed(276, 277, 278, 279, 283)
def test_the_four_questions_are_answered_from_the_run(parts: dict[str, str], device: str) -> None:
    text = parts["compare"]
    assert "1. Where does memory peak (forward or backward)?\n   In: backward." in text
    saved = re.search(
        rf"checkpointing save\?\n   {MIB} of ([\d.]+), (\d+)%; with AMP besides", text
    )
    assert saved
    assert float(saved[1]) / float(saved[2]) == pytest.approx(int(saved[3]) / 100, abs=0.01)
    assert re.search(
        r"overhead of checkpointing\?\n   A step takes [+-]\d+%: \d+ ms for \d+\.", text
    )
    if device == "cuda" and devices.simulated():
        return  # no kernel has computed a loss
    losses = re.search(r"unseen data is ([\d.]+) for ([\d.]+) \(", text)
    untaught = re.search(r"A model that always returns 0 has ([\d.]+)\.", text)
    assert losses
    assert untaught
    with_amp, without = float(losses[1]), float(losses[2])
    assert max(with_amp, without) < 0.5 * float(untaught[1])  # there is something to compare
    assert with_amp == pytest.approx(without, rel=0.05)


@only_on_the_cpu
def test_the_pages_on_compare_and_advise_show_what_these_runs_say(
    parts: dict[str, str], folder: Path
) -> None:
    blocks = [b.code for name in ("compare.md", "advise.md") for b in pages.blocks(name)]
    own = re.search(r"^\$ memlog compare (\w+) (\w+)", parts["compare"], re.MULTILINE)
    assert own
    documented = re.search(r"^\$ memlog compare (\w+) (\w+)\n", blocks[0])
    assert documented
    # Other blocks are about other runs.
    shown = [code for code in blocks if set(code.split("\n")[0].split()) & set(documented.groups())]
    names = dict(zip(documented.groups(), own.groups(), strict=True))
    for code in shown:
        first, _, rest = code.partition("\n")
        command, _, _ = first.removeprefix("$ memlog ").partition(" > /dev/null")
        words = (names.get(word, word) for word in shlex.split(command))
        process = child.start_memlog(*words, directory=folder, inherited=hyco.environment())
        printed, errors = process.communicate(timeout=240)
        if "> /dev/null" in first:
            printed = f"{errors}$ echo $?\n{process.returncode}\n"
        for documented_name, name in names.items():
            printed = printed.replace(name, documented_name)
        assert steady(printed) == steady(rest)
    assert len(shown) == 3


def steady(text: str) -> list[str]:
    """Lines without numbers, names of runs, widths of columns, and rows that only some machines have."""
    runs = re.search(r"^\$ memlog compare (\w+) (\w+)", text, re.MULTILINE)
    for name in runs.groups() if runs else ():
        text = text.replace(name, "RUN")
    lines = (" ".join(line.split()) for line in pages.masked(text))
    return [line for line in lines if line and not line.startswith(("host.tree", "host.cgroup"))]


@only_on_the_cpu
@pytest.mark.seed(69)
def test_the_page_shows_what_is_printed(parts: dict[str, str], folder: Path) -> None:
    exercise, estimates = (
        block.code
        for block in pages.blocks("project/memory_exercise.md")
        if block.language == "console"
    )
    for part in ("snapshot", "phases", "compare"):  # times decide the units in the profiler's table
        shown = exercise[exercise.index(parts[part].splitlines()[0]) :].partition("\n== ")[0]
        assert steady(shown) == steady(parts[part])
    printed = run(folder, "gpu_memory_profiler.py")
    shown = estimates.partition("\n")[2]
    assert pages.masked(shown) == pages.masked(printed)
    # oneDNN's blocks depend on the processor.
    assert _numbers(shown) == pytest.approx(_numbers(printed), rel=0.005)


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
