"""Descriptions of the holders of growing memory."""

from __future__ import annotations

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

    Attributes:
        kind: Kind of cause, such as ``kept_graph``.
        title: Sentences that name the holder and the memory that it keeps.
        where: File and line, such as ``train.py:31``; ``None`` if unknown.
        bytes_per_step: Bytes that the holder gains per step; 0 if unknown.
        evidence: Observations that support the title.
        confidence: Confidence that the title is true.
        remedy: Advice on what to change in the program; ``None`` if unknown.
    """

    kind: HolderKind
    title: str
    where: str | None
    bytes_per_step: float
    evidence: tuple[str, ...]
    confidence: Confidence
    remedy: str | None
