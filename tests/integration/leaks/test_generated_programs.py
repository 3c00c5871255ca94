"""Generated programs with planted leaks: the holder is named, also after a kill, and no twin is alarmed."""

import sys
from pathlib import Path

import pytest

from benchmarks.insight.generated.programs import program
from benchmarks.insight.generated.run import one, said_about
from benchmarks.insight.generated.scoring import names_holder

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_planted_leak_is_named_with_its_remedy_and_its_twin_is_not(tmp_path: Path) -> None:
    chosen = program(1, 2)
    assert (chosen.holder, chosen.period, chosen.trainer) == ("list", 25, "plain")
    result = one(chosen, tmp_path)
    assert not result.error
    assert result.score is not None
    assert result.score.why == ()
    assert result.leak.named_at is not None, "named while it trains"


def test_a_planted_leak_is_named_in_a_program_that_is_killed(tmp_path: Path) -> None:
    chosen = program(3, 23)
    assert (chosen.kept.name, chosen.period, chosen.end) == ("Arrow arrays", 8, "kill")
    said = said_about(chosen, "leak", tmp_path, again=False)
    assert not said.error
    assert names_holder(said.findings[0], chosen)
    assert said.findings[0].kind in chosen.kept.kinds
