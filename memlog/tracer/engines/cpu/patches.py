"""Patches of torch functions that no dispatch mode sees.

FSDP frees gathered parameters with ``storage.resize_(0)``. Checkpointing copies the random number generator's
state. Compiled code calls the allocator directly. memlog replaces each of these functions while a window is
open, and then restores the original.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import torch

from memlog.tracer.hooks.function_patch import AroundPatch, FunctionPatch

STORAGE_RESIZES: Final = FunctionPatch(torch.UntypedStorage, "resize_")
"""Resizing of storages by Python code."""
RANDOM_STATE_COPIES: Final = FunctionPatch(torch, "get_rng_state")
"""Copies of the random number generator's state. Checkpointing makes and keeps such copies."""

_COMPILED = (
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.output_code", "CompiledAOTI"),
    ("torch.export.pt2_archive._package", "AOTICompiledModel"),
)
"""Classes whose call runs Inductor's code, in the forward or the backward pass."""
_compiled: dict[str, AroundPatch] = {}


def compiled_code() -> Sequence[AroundPatch]:
    """Return a patch for each class that runs Inductor's code and that this process has loaded."""
    for module, name in _COMPILED:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and name not in _compiled:
            _compiled[name] = AroundPatch(found, "__call__")
    return tuple(_compiled.values())
