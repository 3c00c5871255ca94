"""The instructions of a step, of the import and of ``show`` are those in benchmarks/instructions.json."""

import json

import pytest

from benchmarks import instructions
from benchmarks.instructions import FILE, LABELS, LEAN, PAGE, STEP, differences, section

pytestmark = pytest.mark.slow

COMMITTED = json.loads(FILE.read_text())


@pytest.mark.skipif(
    instructions.missing() is not None, reason=f"can't count: {instructions.missing()}"
)
def test_the_counts_are_those_of_the_last_measurement() -> None:
    """If this fails: find the reason, and run ``python -m benchmarks.instructions --write``."""
    counts = instructions.measure(with_torch=False)
    print(counts)
    assert differences(COMMITTED, counts) == {}
    assert counts[STEP] <= 40_000


def test_a_count_is_compared_with_that_of_lean() -> None:
    other = {name: count * 1.1 for name, count in COMMITTED.items()}
    assert differences(COMMITTED, other) == {}
    dearer = {**other, STEP: other[STEP] * 1.03}
    assert differences(COMMITTED, dearer) == {STEP: (pytest.approx(other[STEP]), dearer[STEP])}
    lean = {**COMMITTED, LEAN: COMMITTED[LEAN] * 1.1}
    assert set(differences(COMMITTED, lean)) == set(COMMITTED) - {LEAN}


def test_the_page_has_the_committed_counts() -> None:
    assert set(COMMITTED) == set(LABELS)
    assert section(COMMITTED) in PAGE.read_text()
