"""What the example prints that measures lazy loading."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import hyco
from support.events import runs_in

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def measured(folder: Path, *options: str) -> tuple[float, float, list[float]]:
    """Saved bytes, the data's size in bytes, and both resident sets in MB."""
    output = subprocess.run(
        [sys.executable, str(hyco.EXAMPLES / "lazy_loading.py"), "--frames", "61", *options],
        cwd=folder,
        env=hyco.environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    data = re.search(r"float64: ([\d.]+) MB", output)
    saved = re.search(r"^Saved: ([\d,]+) bytes \(([\d.]+) MB\)$", output, re.MULTILINE)
    shares = re.search(r"  (\d+)% of the data, (\d+)% of the resident set", output)
    resident = [float(text) for text in re.findall(r"resident +([\d.]+) MB", output)]
    assert data
    assert saved
    assert shares
    size, amount = float(data[1]) * 1024**2, float(saved[1].replace(",", ""))
    assert int(shares[1]) == round(100 * amount / size)
    assert int(shares[2]) == round(100 * amount / 1024**2 / resident[0])
    return amount, size, resident


@pytest.mark.seed(127, 128, 140)
def test_a_cache_of_5_of_20_saves_about_three_quarters_of_the_data(tmp_path: Path) -> None:
    five, data, resident = measured(tmp_path)
    assert five / data == pytest.approx(0.75, abs=0.1)
    assert resident[0] - resident[1] == pytest.approx(five / 1024**2, abs=0.2)
    assert five / 1024**2 / resident[0] > 0.29  # the document's share of the resident set
    assert len(runs_in(tmp_path)) == 2  # one process each
    three, _, fewer = measured(tmp_path, "--max-cached-sims", "3")
    assert three / data == pytest.approx(0.85, abs=0.1)
    assert three > five  # fewer simulations, less memory
    assert fewer[1] < resident[1]
