"""Private parts of the torch that the program has loaded. This module never imports torch.

Each function takes what it needs by name when it is called. It returns `None` or a default if this version
of torch lacks it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

NO_TASK = -1
"""Number of the backward pass of a thread that runs none."""


def backward_task_of(torch: Any) -> Callable[[], int] | None:
    """Return the function that returns the number of a thread's backward pass, -1 outside one."""
    return getattr(torch._C, "_current_graph_task_id", None)


def in_backward() -> bool:
    """Return True if the calling thread runs an operation of a backward pass."""
    current = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_graph_task_id", None)
    return current is not None and current() != NO_TASK


def without_functions_of_subclasses(torch: Any) -> AbstractContextManager[Any]:
    """Return a context in which no ``__torch_function__`` runs: it can be the program's code.

    For the training thread, on which the import of `memlog.torchside.tensors` would take time in a step.
    """
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def running_node() -> Any:
    """Return the autograd node that the calling thread runs; ``None`` if it runs none, or if unknown."""
    current = getattr(sys.modules["torch"]._C, "_current_autograd_node", None)
    return None if current is None else current()


def first_output_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the first result of an autograd node's operation; empty if it is unknown."""
    results = getattr(
        node, "_input_metadata", None
    )  # the inputs of a node are gradients of results
    return tuple(int(size) for size in results[0].shape) if results else ()


def has_built_graphs() -> bool:
    """Return True if the calling thread has built autograd graphs."""
    next_number = getattr(sys.modules.get("torch.autograd"), "_get_sequence_nr", None)
    return next_number is not None and next_number() > 0


def has_loaders_workers() -> bool:
    """Return True if a DataLoader has had worker processes in this process."""
    module = sys.modules.get("torch.utils.data._utils.signal_handling")
    return bool(getattr(module, "_SIGCHLD_handler_set", False))


def is_without_value(torch: Any, tensor: Any) -> bool:
    """Return True if a tensor holds no number: it belongs to ``torch.func``, to a fake mode or to a graph."""
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    if wrapped is not None and wrapped(tensor):
        return True
    return type(tensor).__module__.startswith(("torch._subclasses", "torch.fx"))


def statistics_of(torch: Any, kind: str) -> Callable[[int], dict[str, Any]] | None:
    """Return the function that reads an allocator's statistics as nested dicts.

    It takes a device's index, and 11 µs, where the public ``memory_stats`` flattens and sorts for 129 µs.
    ``_accelerator_getDeviceStats`` takes as long, and lacks the private pools. ``kind`` is the type of the
    device, such as ``cuda``.
    """
    return getattr(torch._C, f"_{kind}_memoryStats", None)


def allocator_settings_of(torch: Any) -> str | None:
    """Return the settings of the device's allocator; ``None`` if this version of torch can't tell them."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if settings is None else str(settings())


def records_history(torch: Any, kind: str = "cuda") -> bool:
    """Return True if the allocator of a kind of devices records a history of allocations."""
    is_on = getattr(torch._C, f"_{kind}_isHistoryEnabled", None)
    return is_on is not None and bool(is_on())


def cuda_snapshot(torch: Any) -> Any:
    """Return CUDA's snapshot of its allocator, with the history if one is recorded."""
    return torch.cuda.memory._snapshot()


def attach_out_of_memory_observer(
    torch: Any, observer: Callable[[int, int, int, int], None]
) -> None:
    """Let CUDA's allocator call ``observer(device, requested, allowed, free)`` when an allocation fails.

    This can't be undone, and initialises CUDA. If this version of torch has no observers, do nothing.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observer)
