"""Traced steps of two ranks with a CUDA device each: peaks are the allocator's, buffers have a name."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from support import devices
from support.traced_ranks import PARAMETERS, traced

pytestmark = [pytest.mark.integration, pytest.mark.cuda]


def test_each_byte_of_the_peak_has_a_category(tmp_path: Path) -> None:
    ranks = traced(tmp_path, "cuda", **devices.need_two())
    for step in chain.from_iterable(ranks.values()):
        assert step["exactness"] == "exact"
        assert step["peak"] == step["allocator"] == sum(step["categories"].values())
        left = max(0, step["older"] - step["categories"]["workspaces"])  # by the model before
        if step["way"] == "ddp" and step["step"] > 0:
            left += PARAMETERS  # torch keeps the first step's buffers for some time
        assert step["categories"].get("other", 0) <= left, step
    for step in ranks["ddp"]:
        assert step["categories"]["communication"] >= PARAMETERS
    for step in ranks["ddp in views"]:
        assert "communication" not in step["categories"]
        assert step["categories"]["gradients"] >= PARAMETERS
    for way in ("fsdp", "fsdp kept"):
        for step in ranks[way]:
            assert step["categories"]["parameters"] == PARAMETERS // 2
    for step in ranks["fsdp kept"]:  # its peak is at the end of the forward pass
        assert step["categories"]["unsharded parameters"] == PARAMETERS
        assert step["categories"]["communication"] >= PARAMETERS // 4
