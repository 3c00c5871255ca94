"""Records of what holds growing memory."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

HolderKind: TypeAlias = Literal[
    "kept_graph",
    "kept_tensors",
    "growing_container",
    "gradients_not_cleared",
    "unowned_gradients",
    "forward_without_backward",
    "optimizers_pile_up",
    "model_copies",
    "hooks_pile_up",
    "reference_cycles",
    "python_memory",
    "native_library",
    "worker_process",
    "shared_memory",
    "allocator_free_lists",
]
Confidence: TypeAlias = Literal["high", "medium", "low"]


class Holder(NamedTuple):
    """Holder of memory that grows.

    Attributes:
        kind: Kind of cause.
        title: Sentence that names the holder and what it keeps.
        where: File and line, such as ``train.py:31``; ``None`` if unknown.
        bytes_per_step: Bytes that it gains per step; 0 if unknown.
        evidence: Observations that support it.
        confidence: How sure this is.
        remedy: What to change; ``None`` if unknown.
    """

    kind: HolderKind
    title: str
    where: str | None
    bytes_per_step: float
    evidence: tuple[str, ...]
    confidence: Confidence
    remedy: str | None
