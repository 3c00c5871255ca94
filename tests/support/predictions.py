"""Predictions for the cases of `support.training`. Each is computed only once."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from memlog.torchside import internals
from memlog.trace.predict import Advice, Hint, advise
from memlog.trace.records import RecordedTrace
from support.training import CASES, Case, measured_peak, traced

TOLERANCE = 0.1


@cache
def trace_of(case: str) -> RecordedTrace:
    trace = traced(CASES[case])
    # The first trace measures a convolution's workspace for each shape. The second trace uses the result.
    return trace if not trace.result.dropped else traced(CASES[case])


@cache
def advice_for(case: str) -> Advice:
    return advise(trace_of(case))


def hint(case: str, kind: str, words: str = "") -> Hint:
    found = [one for one in advice_for(case).hints if one.kind == kind and words in one.what]
    assert len(found) == 1, advice_for(case).hints
    return found[0]


def autocast_is_not_predicted(advice: Advice, model: nn.Module) -> bool:
    """Return True if oneDNN cannot compute a model's convolutions in bfloat16 on this processor.

    The advice must then give no figure, and say why.
    """
    kinds = {type(part).__name__ for part in model.modules()}
    if internals.onednn_has_bfloat16() or not any(kind.startswith("Conv") for kind in kinds):
        return False
    assert "precision" not in {one.kind for one in advice.hints}
    assert any("no instructions for bfloat16 convolutions" in note for note in advice.notes)
    return True


def assert_autocast_is_predicted(case: Case) -> None:
    """Compare the predicted peak under autocast with the measured peak."""
    traced(case)  # what a convolution takes inside is measured once for each shape
    advice = advise(traced(case))
    if autocast_is_not_predicted(advice, case.model()):
        return
    [found] = [one for one in advice.hints if one.kind == "precision"]
    assert found.peak == pytest.approx(measured_peak(case, autocast=True), rel=TOLERANCE)
