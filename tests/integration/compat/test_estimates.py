"""Estimates of the memory of HYCO's UNet compared with HYCO's documents."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support import child, hyco

from memlog.compat.gpu_memory_profiler import MemoryEstimate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        importlib.util.find_spec("phiml") is None, reason="phiml is not installed: group `examples`"
    ),
]

MB = 1024**2


def estimates(folder: Path, *settings: tuple[Any, ...]) -> list[MemoryEstimate]:
    """Return estimates of the example's network, from a new process: phiml's import raises warnings."""
    script = f"""
    import json, sys
    sys.path.insert(0, {str(hyco.EXAMPLES)!r})
    import gpu_memory_profiler as profiler
    from msgspec.structs import asdict
    net = profiler.network()
    print(json.dumps([asdict(profiler.estimate(net, profiler.Setting(*s))) for s in {settings!r}]))
    """
    printed = child.run(script, folder, timeout=100, PYTHONWARNINGS="ignore")
    return [MemoryEstimate(**found) for found in json.loads(printed)]


@pytest.mark.seed(69, 104, 105, 106, 107, 108, 110, 111, 112, 117)
def test_the_documents_figures_are_derived_where_they_hold(tmp_path: Path) -> None:
    found, twice = estimates(tmp_path, (16, 3, 128), (32, 3, 128))
    weights = 4 * 593_794
    assert found.parameters == found.gradients == weights  # 2.3 MB; the documents say 23
    assert found.optimizer_state == pytest.approx(2 * weights, rel=0.001)
    assert found.data == 16 * (3 + 1) * 2 * 128 * 128 * 4  # 8 MB; the documents say 30
    assert found.activations / MB == pytest.approx(2750, rel=0.01)
    assert twice.activations / MB == pytest.approx(5500, rel=0.01)
    assert found.after_forward / MB == pytest.approx(2745, rel=0.005)
    assert found.peak / MB == pytest.approx(2880, rel=0.01)
    # Two figures that differ: the documents say 10 and 18 MB.
    assert found.after_data / MB == pytest.approx(15, rel=0.02)
    assert found.after_backward / MB == pytest.approx(9, rel=0.02)
    assert found.after_backward == found.after_optimizer < found.after_data
    rest = found.parameters + found.buffers + found.optimizer_state
    assert found.after_data == rest + found.data


@pytest.mark.seed(109, 119, 120, 121, 122)
def test_activations_follow_batch_and_steps_and_what_saves_saves(tmp_path: Path) -> None:
    scaled = ((4, 2), (16, 2), (8, 1), (8, 4))
    whole, autocast, checkpointed, halves, *others = estimates(
        tmp_path,
        (8, 2, 64),
        (8, 2, 64, True),
        (8, 2, 64, False, True),
        (4, 2, 64, False, False, 2),
        *((*pair, 64) for pair in scaled),
    )
    for (batch, steps), other in zip(scaled, others, strict=True):
        times = batch * steps / (8 * 2)
        assert other.activations == pytest.approx(times * whole.activations, rel=0.001)
    assert halves.peak < 0.55 * whole.peak
    assert 0.4 < 1 - autocast.peak / whole.peak < 0.5
    assert checkpointed.activations < 0.01 * whole.activations
    assert checkpointed.peak < 0.6 * whole.peak
