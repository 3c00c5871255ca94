"""What a checkpoint of the training has to save, and the way in which the trainer will save it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from memlog.events.parts import Int

SavingWay: TypeAlias = Literal[
    "state_dict",
    "deepcopy",
    "cpu_copies",
    "torch_save",
    "torch_save_buffer",
    "dcp_save",
    "dcp_async_save",
    "full_state_dict",
    "full_state_dict_on_device",
    "save_pretrained",
    "transformers_trainer",
    "lightning",
]
"""Way of saving a checkpoint; `memlog.facts.first_checkpoint` has the calls."""


class SavedTensors(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of tensors that one ``state_dict()`` has. Storages count once, also if several tensors share one.

    A tensor that is distributed over several processes counts with this process's part.
    """

    host: Int
    """Storages in the host's memory."""
    device: Int
    """Storages on devices."""
    largest: Int
    """Largest storage on a device."""
    buffered: Int
    """Highest number of bytes while the storages are copied to one buffer in the host's memory, one after the
    other. A storage on a device is first copied to the host."""
    small: Int
    """Storages on devices of less than 32 MiB. If they are copied to the host one after the other, the C
    library may not free the copies at once."""
    copied: Int
    """Copies that ``dcp.save`` keeps on the host until it has written its file: those from a CUDA device are
    in page-locked memory, each in a block of a power of two."""
    whole: Int
    """Whole tensors of which this process has parts, and which are gathered on a device."""
    undivided: Int
    """Tensors on devices that are not distributed."""
    gathered: Int
    """Device memory to gather the whole tensor that takes most; 0: none is gathered on a device."""
    sharded: Int
    """Parts of tensors that no other process has."""
    whole_on_host: Int = 0
    """Whole tensors of which this process has parts, and which are gathered on the host."""
    gathered_on_host: Int = 0
    """Highest number of bytes while whole tensors are gathered on the host, one after the other, and kept; 0:
    none is gathered there."""


class SavedState(msgspec.Struct, frozen=True, array_like=True, tag="saved_state"):
    """Size of what a checkpoint saves, published once, after the optimizer's first step."""

    time_us: Int
    step: Int | None
    """Last completed step."""
    model: SavedTensors
    optimizer: SavedTensors
    whole_model: bool
    """False if ``model`` has only the parameters that the optimizer changes, without buffers and without
    parameters that are not trained: no other ones are known."""
    ranks: Int = 1
    """Number of processes that train together."""
    dcp_keeps_copies: bool = True
    """False if the installed torch frees each copy in ``dcp.save`` when the copy is written."""
    safetensors_copies: bool = False
    """True if the installed safetensors copies all tensors of a file to Python's bytes (before 0.8)."""
    shard: Int = 50_000_000_000
    """Maximum bytes of a file of ``save_pretrained``."""
    way: SavingWay | None = None
    """Way in which the trainer will save; ``None``: unknown."""
    first_at: Int | None = None
    """Step after which the trainer saves first; ``None``: unknown."""
