"""Sizes of what a checkpoint saves, from the tensors of a model and of its optimizers."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from memlog.events import SavedState, SavedTensors, SavingWay, now_us

_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MAPPED: Final = 32 * 2**20
"""Bytes from which the GNU C library maps memory and unmaps it when it is freed, whatever came before
(``DEFAULT_MMAP_THRESHOLD_MAX``)."""
_SHARD: Final = 50 * 10**9
"""Bytes of a file of ``save_pretrained`` in Transformers 5."""


def saved_state(
    model: Any,
    optimizers: Iterable[Any],
    *,
    ranks: int = 1,
    step: int | None = None,
    way: SavingWay | None = None,
    first_at: int | None = None,
    trained_only: bool = False,
    is_on_host: Callable[[Any], bool] | None = None,
) -> SavedState | None:
    """Return the size of a training's checkpoint; ``None`` if a tensor does not tell its size.

    Nothing is computed, and no ``state_dict()`` is made: that of FSDP would gather the model. A thousand
    tensors take about 6 ms.

    Args:
        model: The model; ``None``: the parameters of the optimizers.
        optimizers: The optimizers, after a step that has made their state.
        ranks: Number of processes that train together.
        step: Last completed step.
        way: Way in which the trainer will save; ``None``: unknown. It counts as unknown if the model changes
            its own ``state_dict()``.
        first_at: Step after which the trainer saves first; ``None``: unknown.
        trained_only: True if the checkpoint has only those of the model's parameters that are trained.
        is_on_host: Function that returns whether a tensor is in the host's memory; ``None``: by its device.
    """
    optimizers, libraries = list(optimizers), copying_libraries()
    if model is None:
        of_model = [each for one in optimizers for each in _parameters(one)]
    else:
        of_model = list(_saved(model))
        if trained_only:
            of_model = [each for each in of_model if each.requires_grad]
    of_optimizers = [each for one in optimizers for each in _tensors(one.state)]
    if any(_is_opaque(each) for each in of_model):
        return None
    place = _is_on_host if is_on_host is None else is_on_host
    try:
        sums = _sums(of_model, place), _sums(of_optimizers, place)
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return None
    return SavedState(
        time_us=now_us(),
        step=step,
        model=sums[0],
        optimizer=sums[1],
        whole_model=model is not None,
        ranks=ranks,
        dcp_keeps_copies=libraries.dcp_keeps,
        safetensors_copies=libraries.safetensors_copies,
        shard=_shard(model),
        way=None if way is None or _changes_state_dict(model) else way,
        first_at=first_at,
    )


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _saved(model: Any) -> Iterator[Any]:
    """Return the parameters and persistent buffers of a model, in the order of its ``state_dict()``."""
    for module in model.modules():
        yield from (each for each in module._parameters.values() if each is not None)  # noqa: SLF001 - see below
        left_out = module._non_persistent_buffers_set  # noqa: SLF001 - no public function tells it
        for name, each in module._buffers.items():  # noqa: SLF001 - likewise
            if each is not None and name not in left_out:
                yield each


def _changes_state_dict(model: Any) -> bool:
    """Return whether a class, an attribute or a hook of a model may change what ``state_dict()`` returns."""
    return any(
        module._state_dict_hooks  # noqa: SLF001 - no public function tells it
        or module._state_dict_pre_hooks  # noqa: SLF001 - likewise
        or any(
            # Metrics of torchmetrics only add states, which are small.
            getattr(module, name).__module__
            not in ("torch.nn.modules.module", "torchmetrics.metric")
            for name in ("state_dict", "_save_to_state_dict")
        )
        for module in model.modules()
    )


def _tensors(value: Any) -> Iterator[Any]:
    """Return the tensors in nested containers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "untyped_storage"):
        yield value


def _is_opaque(tensor: Any) -> bool:
    """Return whether a parameter hides its size: FSDP1's and DeepSpeed's are parts of others."""
    return type(tensor).__name__ == "FlatParameter" or hasattr(tensor, "ds_id")


def _is_on_host(tensor: Any) -> bool:
    return tensor.device.type == "cpu"  # type: ignore[no-any-return]


def _sums(tensors: Iterable[Any], is_on_host: Callable[[Any], bool]) -> SavedTensors:
    host = device = largest = buffered = small = copied = whole = undivided = gathered = sharded = 0
    whole_on_host = gathered_on_host = 0
    seen: set[int] = set()
    for tensor in tensors:
        placements = getattr(tensor, "placements", None)
        local = tensor if placements is None else tensor._local_tensor  # noqa: SLF001 - to_local() is recorded
        storage, on_host = local.untyped_storage(), is_on_host(local)
        size, stored = _size(local), storage.nbytes()
        if not on_host:
            copied += 1 << (size - 1).bit_length() if _is_pinned(local) and size else size
        elif stored != size:
            copied += size
        if placements is not None:
            if on_host and tensor.device_mesh.device_type == "cpu":
                taken = _gathered(tensor, size, pieces=2)
                gathered_on_host = max(gathered_on_host, whole_on_host + taken)
                whole_on_host += _size(tensor) if taken else 0
            else:
                whole += _size(tensor)
                gathered = max(gathered, _gathered(tensor, size) + on_host * size)
            sharded += size if all(one.is_shard() for one in placements) else 0
        elif not on_host:
            undivided += size
        if storage._cdata in seen:  # noqa: SLF001 - the address of the storage, also of a fake one
            continue
        seen.add(storage._cdata)  # noqa: SLF001 - likewise
        if on_host:
            host += stored
        else:
            device, largest = device + stored, max(largest, stored)
            small += stored if stored < _MAPPED else 0
        buffered = max(buffered, host + device + (0 if on_host else stored))
    return SavedTensors(
        host,
        device,
        largest,
        buffered,
        small,
        copied,
        whole,
        undivided,
        gathered,
        sharded,
        whole_on_host,
        gathered_on_host,
    )


def _size(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _is_pinned(tensor: Any) -> bool:
    """Return whether ``dcp.save`` copies a tensor to page-locked memory. A fake tensor stands for CUDA's."""
    return tensor.device.type in ("cuda", "cpu")


def _gathered(tensor: Any, local: int, pieces: int = 1) -> int:
    """Return the memory to gather a whole tensor, one dimension of its mesh after the other.

    A tensor that is divided along another dimension than its first is gathered in pieces, which are then
    joined. ``pieces`` is 2 if the backend makes a copy of all pieces: Gloo, which gathers on the host, does.
    """
    most, size, before = 0, local, 0
    whole = _size(tensor)
    for dimension in reversed(range(len(tensor.placements))):
        placement = tensor.placements[dimension]
        if placement.is_shard():
            size = min(size * tensor.device_mesh.size(dimension), whole)
            most = max(most, before + size * (pieces if placement.dim == 0 else 2))
            before = size
    return most


class CopyingLibraries(NamedTuple):
    """What the installed libraries do when they save; see `SavedState`."""

    dcp_keeps: bool
    safetensors_copies: bool


@functools.cache
def copying_libraries() -> CopyingLibraries:
    """Return how the installed libraries save. The first call reads two of their files.

    A text in the files tells it, without an import. Versions would not: forks have their own.
    """
    return CopyingLibraries(
        _has("torch", "distributed/checkpoint/filesystem.py", "tensor_dict["),
        not _has("safetensors", "torch.py", "_flatten_as_ptr"),
    )


def _has(package: str, path: str, text: str) -> bool:
    """Return whether a file of an installed package has a text; True if there is no such file."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return True
    file = Path(found.origin).parent / path
    return not file.is_file() or text in file.read_text("utf-8", "replace")


def _shard(model: Any) -> int:
    """Return the maximum bytes of a file that a model's ``save_pretrained`` writes if no call limits it.

    The program may have replaced the method by a ``functools.partial`` of it.
    """
    own = getattr(model, "__dict__", {}).get("save_pretrained")
    given = own.keywords.get("max_shard_size") if isinstance(own, functools.partial) else None
    if given is not None:
        return _bytes_of(given)
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return _SHARD
    import inspect  # noqa: PLC0415 - only programs with Transformers need it

    known = inspect.signature(module.PreTrainedModel.save_pretrained).parameters
    return _bytes_of(known["max_shard_size"].default)


def _bytes_of(size: Any) -> int:
    """Return a size of a file, such as ``"5GB"``, in bytes."""
    text = str(size).upper()
    unit = next((one for one in reversed(_UNITS) if text.endswith(one)), "")
    number = text.removesuffix(unit)
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else _SHARD
