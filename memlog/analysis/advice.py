"""What would help a run that had too little memory, from what its journal and its worst traced step say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from memlog.analysis.last_moments import LastMoments
from memlog.analysis.predict import Advice
from memlog.events import OutOfMemory, Trace
from memlog.units import format_bytes

_LARGE = 0.3
"""Share of the peak from which a category is worth a word."""
_LEAK = 0.1
"""Growth over the last steps, as a share, that looks like a leak."""
_WORKERS = 0.5
"""Share of the tree's memory in other processes that is worth a word."""


def advice(moments: LastMoments, predicted: Advice | None = None) -> list[str]:
    """Lines, the most promising first; never empty.

    Args:
        moments: How the run ended.
        predicted: What would make its worst traced step smaller, where its events are there.
    """
    found = [
        *_leak(moments),
        *_fragmentation(moments.failure),
        *(_by_prediction(predicted) or _by_category(moments.trace)),
        *_workers(moments),
        *_limit(moments.failure),
    ]
    return found or [
        "A smaller batch, or gradient accumulation in place of a larger one.",
        "Tracing says who holds the memory: `memlog.init(model=model, layers=True)`.",
    ]


def _leak(moments: LastMoments) -> Iterator[str]:
    if len(moments.steps) < 20:  # noqa: PLR2004 - in fewer steps anything grows
        return
    third = len(moments.steps) // 3
    levels = [moments.steps[at].rss for at in (0, third, 2 * third, -1)]
    known = [level for level in levels if level is not None]
    rising = len(known) == len(levels) and all(a < b for a, b in pairwise(known))
    if rising and known[-1] > known[0] * (1 + _LEAK):
        yield (
            "The host's memory grew at every look: something keeps what each step makes. Often it is a "
            "list of losses with their graphs (append `loss.item()` or `loss.detach()`), or a cache "
            "without a bound."
        )


def _fragmentation(failure: OutOfMemory | None) -> Iterator[str]:
    if failure is None or failure.reserved is None or failure.allocated is None:
        return
    unused = failure.reserved - failure.allocated
    if failure.requested is not None and unused >= failure.requested:
        yield (
            f"The allocator holds {format_bytes(unused)} that no tensor uses, but not in one piece: "
            "`PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9: "
            "`PYTORCH_CUDA_ALLOC_CONF`) makes room of it."
        )


def _by_prediction(predicted: Advice | None) -> list[str]:
    if predicted is None or not predicted.hints:
        return []
    return [hint.sentence() for hint in predicted.hints] + [
        f"These peaks are predicted from the worst traced step, which needs {format_bytes(predicted.peak)}. "
        + " ".join(predicted.notes)
    ]


def _by_category(trace: Trace | None) -> Iterator[str]:
    if trace is None or not trace.peak:
        return
    share = {name: size / trace.peak for name, size in trace.at_peak.items()}
    if share.get("activations", 0) >= _LARGE:
        size = format_bytes(trace.at_peak["activations"])
        top = ", ".join(f"`{layer.path}`" for layer in trace.layers[:3] if layer.path)
        where = f" (most of all by {top})" if top else ""
        yield (
            f"Activations hold {size}{where}: half the batch needs about half of that; "
            "`torch.utils.checkpoint` computes them again in backward; bfloat16 autocast makes them smaller."
        )
    if share.get("optimizer state", 0) >= _LARGE:
        yield (
            f"The optimizer's state holds {format_bytes(trace.at_peak['optimizer state'])}: SGD with "
            "momentum needs half of Adam's, 8-bit optimizers a quarter; sharding (FSDP, ZeRO) divides it."
        )
    if share.get("parameters", 0) + share.get("gradients", 0) >= 2 * _LARGE:
        yield "Parameters and gradients hold most: bfloat16 weights halve them, sharding (FSDP) divides them."


def _workers(moments: LastMoments) -> Iterator[str]:
    sample = moments.samples[-1] if moments.samples else None
    rss = moments.steps[-1].rss if moments.steps else None
    if sample is None or not sample.tree_pss or rss is None or (sample.tree_processes or 1) < 2:  # noqa: PLR2004
        return
    others = sample.tree_pss - rss
    if others > _WORKERS * sample.tree_pss:
        yield (
            f"{(sample.tree_processes or 2) - 1} other processes of the tree hold about "
            f"{format_bytes(others)}: fewer DataLoader workers, or data that they share."
        )


def _limit(failure: OutOfMemory | None) -> Iterator[str]:
    if failure is None or failure.limited_by is None or failure.device != "host":
        return
    yield f"Raise what limits it: {failure.limited_by} ({format_bytes(failure.limit)})."
