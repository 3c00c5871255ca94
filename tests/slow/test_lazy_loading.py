"""The example that measures lazy loading, run as docs/project/hyco.md shows it."""

import re
import shutil
from pathlib import Path

import pytest
from support import hyco, pages
from support.events import runs_in

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder in which the page's commands run."""
    copy = hyco.copy_to(tmp_path)
    shutil.copy(hyco.EXAMPLES / "lazy_loading.py", tmp_path)
    return copy


LIBRARIES = 0.2
"""Fraction of the data by which two resident sets can differ for other reasons than lazy loading.

Pages of PyTorch's libraries count in a resident set, and a system short of memory drops them.
"""


def measured(lines: list[str]) -> tuple[float, list[float], list[float]]:
    """Saved fraction of the data, both resident sets, and the simulations of each process, in MB."""
    output = "\n".join(lines)
    data = re.search(r"float64: ([\d.]+) MB", output)
    saved = re.search(r"^Saved: ([\d,]+) bytes \(([\d.]+) MB\)$", output, re.MULTILINE)
    shares = re.search(r"  (\d+)% of the data, (\d+)% of the resident set", output)
    resident = [float(text) for text in re.findall(r"resident +([\d.]+) MB", output)]
    simulations = [float(text) for text in re.findall(r"simulations +([\d.]+) MB", output)]
    assert data
    assert saved
    assert shares
    amount = float(saved[1].replace(",", "")) / 1024**2
    assert resident[0] - resident[1] == pytest.approx(amount, abs=0.2)
    assert int(shares[1]) == round(100 * amount / float(data[1]))
    assert int(shares[2]) == round(100 * amount / resident[0])
    return amount / float(data[1]), resident, simulations


@pytest.mark.seed(127, 128, 140)
def test_a_cache_of_5_of_20_saves_about_three_quarters_of_the_data(folder: Path) -> None:
    [code] = [
        block.code for block in pages.blocks("project/hyco.md") if "$ python ../lazy" in block.code
    ]
    command, _, shown = code.removeprefix("$ ").partition("\n")
    lines = hyco.run(folder, command)
    assert pages.unspaced("\n".join(lines)) == pages.unspaced(shown)
    share, resident, simulations = measured(lines)
    assert simulations[1] == pytest.approx(simulations[0] / 4, abs=0.1)
    assert share == pytest.approx(0.75, abs=LIBRARIES)
    assert (resident[0] - resident[1]) / resident[0] > 0.29  # the seed's share of the resident set
    assert len(runs_in(folder)) == 2  # one process each
