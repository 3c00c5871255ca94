"""Traced steps of two ranks under DDP and FSDP2 with gloo: what the wrappers hold has a name."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.traced_ranks import PARAMETERS, traced

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not dist.is_available() or not hasattr(torch.cpu.Stream, "record_event"),
        reason="this torch's FSDP2 does not run on a CPU",
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return traced(tmp_path_factory.mktemp("ranks"), "cpu")


def test_the_categories_add_up(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert set(ranks) == {"ddp", "ddp in views", "fsdp", "fsdp kept"}
    for step in chain.from_iterable(ranks.values()):
        assert sum(step["categories"].values()) == step["peak"], step
        assert "other" not in step["categories"], step


def test_ddp_reduces_in_buffers_of_its_own(ranks: dict[str, list[dict[str, Any]]]) -> None:
    for step in ranks["ddp"]:  # the buffers are made in another way at the second step
        found = step["categories"]
        assert found["communication"] == found["gradients"] == found["parameters"] == PARAMETERS


def test_gradients_that_are_views_of_the_buffers_are_gradients(
    ranks: dict[str, list[dict[str, Any]]],
) -> None:
    for step in ranks["ddp in views"]:
        assert step["categories"]["gradients"] >= PARAMETERS
        assert "communication" not in step["categories"]


@pytest.mark.parametrize(("way", "unsharded"), [("fsdp", 1), ("fsdp kept", 4)])
def test_fsdp2_holds_whole_parameters_and_buffers(
    ranks: dict[str, list[dict[str, Any]]], way: str, unsharded: int
) -> None:
    for step in ranks[way]:
        found = step["categories"]
        assert found["parameters"] == PARAMETERS // 2
        assert found["unsharded parameters"] == unsharded * PARAMETERS // 4
        assert PARAMETERS // 4 <= found["communication"] <= PARAMETERS
