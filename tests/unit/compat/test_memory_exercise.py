"""The exercise's models, without its child processes and pictures (those are in tests/slow)."""

from __future__ import annotations

import pytest
import torch

import memlog


@pytest.mark.seed(269)
@pytest.mark.slow
def test_the_exercises_checkpointed_model_computes_the_same() -> None:
    import memory_exercise as exercise

    plain, checkpointed = (exercise.Training(way) for way in exercise.TABLE[:2])
    for training in (plain, checkpointed):
        training.backward(training.forward())
    gradients = [[p.grad for p in t.model.parameters()] for t in (plain, checkpointed)]
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other)


def test_checkpointing_saves_more_than_30_percent_and_leaves_out_the_last_block() -> None:
    import memory_exercise as exercise

    peaks = []
    for way in exercise.TABLE[:2]:
        training, tracer = exercise.Training(way), memlog.MemoryTracer()
        training.step()
        with tracer.trace(training.model):
            training.step()
        peaks.append(tracer.result.peak or 0)
    assert peaks[1] < 0.7 * peaks[0]
    recomputed = {
        layer.path for layer in tracer.result.layers if layer.phase("recompute") is not None
    }
    assert {"block1", "block2", "block1.up"} <= recomputed
    assert "block3" not in recomputed
