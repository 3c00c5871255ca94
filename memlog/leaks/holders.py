"""Descriptions of the holders of growing memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

HolderKind: TypeAlias = Literal[
    "kept_graph",
    "kept_tensors",
    "growing_container",
    "gradients_not_cleared",
    "forward_without_backward",
    "optimizers_pile_up",
    "model_copies",
    "hooks_pile_up",
    "reference_cycles",
    "python_memory",
    "native_library",
    "allocator_free_lists",
]
Confidence: TypeAlias = Literal["high", "medium", "low"]


class Holder(NamedTuple):
    """Holder of memory that grows.

    ``title`` names the holder and the memory that it keeps, and ``confidence`` is the confidence that the
    title is true. ``where`` is a file and a line, such as ``train.py:31``; ``None`` if unknown. The holder
    gains ``bytes_per_step``; 0 if unknown. ``remedy`` is ``None`` if unknown. A container with a limit,
    such as a ``deque`` with a ``maxlen``, can still gain ``bytes_left``; ``None``: it has no known limit.
    ``container`` is a container's identity, its length at the end of the search, and the elements that it
    gained per step; ``None``: it is none alone. ``is_chain`` is true for a variable without elements, whose
    value keeps what was there before.
    """

    kind: HolderKind
    title: str
    where: str | None
    bytes_per_step: float
    evidence: tuple[str, ...]
    confidence: Confidence
    remedy: str | None
    bytes_left: float | None = None
    container: tuple[int, int, float] | None = None
    is_chain: bool = False


def per_step(holders: Sequence[Holder]) -> float:
    """Return the bytes per step that all holders gain together."""
    return sum(one.bytes_per_step for one in holders)
