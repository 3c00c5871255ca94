"""Rank of this process among the processes that train together."""

from __future__ import annotations

import os
import sys

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that torchrun and most other launchers set."""


def described() -> dict[str, str]:
    """Return this process's place as parameters: ``rank``, ``local_rank``, ``world_size``, ….

    They come from the launcher's environment variables, or from torch's process group if one exists. The
    result is empty for a process that trains alone.
    """
    known = {name.lower(): os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    return known if "rank" in known else {**_of_the_process_group(), **known}


def is_first() -> bool:
    """Return True if this process trains alone or has rank 0."""
    return described().get("rank", "0") == "0"


def _of_the_process_group() -> dict[str, str]:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    # In a torch built without distributed support the module exists but lacks this function.
    initialized = getattr(distributed, "is_initialized", None)
    if distributed is None or initialized is None or not initialized():
        return {}
    return {
        "rank": str(distributed.get_rank()),
        "world_size": str(distributed.get_world_size()),
    }
