"""Sentences about limitations of the CPU engine.

A derivative is the function that autograd runs for one operation in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

_MOST_NAMES: Final = 8
"""Maximum number of names in a sentence. Further names are left out."""
_NEGLIGIBLE: Final = 0.001
"""If derivatives with a limitation take at most this fraction of the peak, no sentence names them."""

ALWAYS: Final = (
    "Memory that an operation allocates and frees inside itself is measured once for each shape; views, "
    "pointwise operations, copies and fills are assumed to need none.",
    "Copies of a random number generator's state (5 kB each) are seen if torch.get_rng_state makes them, as "
    "checkpointing does, but not if Generator.get_state does.",
    "Memory that is not torch's (numpy, shared memory of a data loader's workers, the interpreter, the "
    "allocator's own fragments) is not seen, unless a parameter or buffer lies on it.",
    "Tensors made before the trace are known only if they belong to the model or an optimizer, or are "
    "arguments of the model.",
    "Tensors made on other threads than the one that began the trace are not seen.",
)
SPARSE: Final = (
    "Pointwise operations on sparse tensors allocate more inside themselves than is measured, so peaks are "
    "lower bounds."
)
COMPLEX: Final = (
    "Operations on complex tensors with a lazy conjugation (torch.conj) first copy them. These copies are "
    "not seen, so peaks are lower bounds."
)
NESTED: Final = (
    "Memory in which nested tensors store their shapes is not seen, so peaks are lower bounds."
)
COMPILED: Final = (
    "Compiled code ran (torch.compile) whose allocations are not all known. They are seen only when torch "
    "operations use them later, so peaks and live bytes at the end are lower bounds."
)
LATE_GRADIENTS: Final = (
    "Some gradients were not made on this thread (perhaps in a backward pass on another one). They count "
    "from when they were first seen, and what was allocated while they were made is unknown."
)
THREADS: Final = (
    "Modules of the model were called on other threads than the one that began the trace. What they allocate "
    "is not seen, so peaks are lower bounds."
)
PRECISION: Final = (
    "The precision of matrix products changed during the trace. It decides what operations allocate inside "
    "themselves, so peaks are lower bounds."
)
UNMEASURED_PREFIX: Final = (
    "The bytes that these operations allocate and free inside themselves are unknown, so peaks are lower "
    "bounds: "
)
"""Beginning of the sentence of `unmeasured`."""
FAILED: Final = (
    "Operations were not recorded because of an error in memlog, so peaks are lower bounds."
)
TRANSFORMED: Final = (
    "Inside a transformation of torch.func (grad, vmap, jvp) all bytes are seen, but its backward pass "
    "counts for the forward pass of the surrounding layer."
)


def compiled(paths: Sequence[str]) -> str:
    """Return the sentence about compiled graphs that were measured. ``paths``: Layers that ran them."""
    names = ", ".join(paths[:_MOST_NAMES]) + (" and more" if len(paths) > _MOST_NAMES else "")
    return (
        "Compiled code ran (torch.compile). The allocator's events have its bytes, and they count for the "
        f"layer that ran it: {names}. Layers inside it, and its line of the program, are unknown."
    )


def unknown_compilers(names: Sequence[str]) -> str:
    """Return the sentence about compilers whose code the engine can't observe."""
    return (
        "Code of these compilers may have run, and what it allocates is unknown, so peaks and live bytes at "
        f"the end are lower bounds: {', '.join(names[:_MOST_NAMES])}."
    )


def altered_derivatives(allocated: Counter[str], peak: int) -> str | None:
    """Return the sentence about derivatives that torch computes in another way during tracing.

    ``allocated``: Bytes of each derivative. If the sum is at most a thousandth of ``peak``, return ``None``.
    """
    names = _names(allocated, peak)
    return names and (
        "During tracing, torch computes these derivatives in another way, so the peak of an untraced "
        f"step may be lower or higher: {names}."
    )


def untraced_derivatives(returned: Counter[str], peak: int) -> str | None:
    """Return the sentence about derivatives that ran without the dispatch mode.

    ``returned``: Bytes of each derivative's results. If the sum is at most a thousandth of ``peak``, return
    ``None``.
    """
    names = _names(returned, peak)
    return names and (
        "Memory that these derivatives allocate and free inside themselves is not seen, because torch would "
        f"compute them in another way if memlog traced inside them: {names}."
    )


def _names(size_of: Counter[str], peak: int) -> str | None:
    """Return the derivatives' names, the largest first; ``None`` if their bytes are negligible."""
    if size_of.total() <= _NEGLIGIBLE * peak:
        return None
    return ", ".join(name for name, _ in size_of.most_common())


def unmeasured(counts: Counter[str]) -> str:
    """Return the sentence about operations whose workspace could not be measured, the most frequent first.

    ``counts``: Number of calls of each operation.
    """
    names = ", ".join(name for name, _ in counts.most_common(_MOST_NAMES))
    more = len(counts) - _MOST_NAMES
    return UNMEASURED_PREFIX + names + (f" and {more} more." if more > 0 else ".")
