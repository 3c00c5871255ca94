"""Search for what holds a device's memory beside the running call of a model, as an allocation fails.

The search looks at variables of the program's running functions, outside the outermost call of a module:
containers of tensors, such as a list of batches, and graphs that earlier forward passes recorded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from memlog._internal.inert_access import container_base, instance_dict, is_kind
from memlog._internal.tracked_objects import tracked_objects
from memlog.events import GraphInUse, HeldTensors
from memlog.inputs.step_inputs import program_frames, variables_of
from memlog.oom.tensor_storage import address, is_on, sizes_of, tensors_in

_MODULE_CALL = "_call_impl"
_FEWEST = 2
"""A container counts if it holds at least so many tensors."""
_FEWEST_ANYWHERE = 8
"""Tensors in no known container count if there are at least so many. A step's inputs are fewer."""
_FEWEST_USES = 3
"""Graphs count if they use most parameters at least so many times. One use is a step's own forward pass."""
_DEPTH = 6
_ITEMS = 10_000
_VALUES = 50_000
_NODES = 100_000
"""Maximum numbers of items of a container, of values, and of nodes of graphs to look at."""


def held_tensors(
    torch: Any, frames: Sequence[FrameType], device: int, left_out: Collection[int]
) -> HeldTensors | None:
    """Return the container with the most bytes of tensors on a device; ``None`` if there is none.

    ``left_out`` holds the addresses of tensors that do not count, such as weights. ``frames`` are the running
    functions, the outermost first.
    """
    found: dict[int, HeldTensors] = {}
    variables = list(_outside(frames))
    left_out = {*left_out, *_optimizer_state(torch, variables)}
    for name, value in variables:
        if is_kind(value, torch.nn.Module) or is_kind(value, torch.optim.Optimizer):
            continue
        for path, container in _containers(name, value):
            if id(container) not in found:
                sizes = sizes_of(
                    each
                    for each in _tensors(torch, container)
                    if is_on(each, device) and address(each) not in left_out
                )
                if len(sizes) >= _FEWEST:
                    found[id(container)] = HeldTensors(path, len(sizes), sum(sizes.values()))
    largest = max(found.values(), key=lambda each: each.size, default=None)
    anywhere = _anywhere(torch, frames, device, left_out)
    if anywhere is not None and anywhere.size > 2 * (0 if largest is None else largest.size):
        return anywhere
    return largest


def _anywhere(
    torch: Any, frames: Sequence[FrameType], device: int, left_out: Collection[int]
) -> HeldTensors | None:
    """Return all tensors without gradients that Python's garbage collector knows; ``None`` if they are few.

    Such as the batches of a running generator, which no variable holds. Weights, gradients, optimizer state
    and the variables of the running modules do not count.
    """
    objects = [
        each
        for each in tracked_objects()
        if issubclass(type(each), (torch.Tensor, torch.optim.Optimizer))
    ]
    state = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    tensors = [
        each for each in objects if issubclass(type(each), torch.Tensor) and is_on(each, device)
    ]
    weights = [each for each in tensors if each.requires_grad or is_kind(each, torch.nn.Parameter)]
    used = {*left_out, *map(address, weights)}
    used |= {address(each.grad) for each in weights if each.is_leaf and each.grad is not None}
    for optimizer in state:
        used |= set(map(address, _tensors(torch, _attributes(optimizer).get("state"))))
    inner = frames[_outermost_call(frames) :]
    for frame in inner:
        used |= {
            address(each) for _, value in variables_of(frame) for each in _tensors(torch, value)
        }
    held = sizes_of(each for each in tensors if address(each) not in used)
    if len(held) < _FEWEST_ANYWHERE:
        return None
    return HeldTensors(None, len(held), sum(held.values()))


def _optimizer_state(torch: Any, variables: Sequence[tuple[str, object]]) -> Iterator[int]:
    """Yield addresses of the state of optimizers in variables, and in attributes of their objects."""
    values = [value for _, value in variables]
    inside = (each for value in values for each in _attributes(value).values())
    for one in (*values, *inside):
        if is_kind(one, torch.optim.Optimizer):
            yield from map(address, _tensors(torch, _attributes(one).get("state")))


def kept_graph(torch: Any, frames: Sequence[FrameType]) -> GraphInUse | None:
    """Return the variable that keeps graphs of the most forward passes; ``None`` if none keeps several."""
    found: list[GraphInUse] = []
    for name, value in _outside(frames):
        roots = [each.grad_fn for each in _tensors(torch, value) if each.grad_fn is not None]
        uses = _uses(roots)
        if uses >= _FEWEST_USES:
            found.append(GraphInUse(name, uses))
    return max(found, key=lambda each: each.uses, default=None)


def _outside(frames: Sequence[FrameType]) -> Iterator[tuple[str, object]]:
    """Yield the variables of the program outside the outermost call of a module, the innermost first."""
    for frame in program_frames(reversed(frames[: _outermost_call(frames)])):
        yield from variables_of(frame)
        if frame.f_code.co_flags & CO_OPTIMIZED:
            names = frame.f_code.co_names
            yield from ((name, frame.f_globals[name]) for name in names if name in frame.f_globals)


def _outermost_call(frames: Sequence[FrameType]) -> int:
    """Return the index of the outermost call of a module; the number of frames if no module runs."""
    calls = (at for at, frame in enumerate(frames) if frame.f_code.co_name == _MODULE_CALL)
    return next(calls, len(frames))


def _containers(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a variable's container with its name, or those in attributes of the variable's object."""
    if _holds(value):
        yield name, value
        return
    for attribute, one in _attributes(value).items():
        if _holds(one):
            yield f"{name}.{attribute}", one


def _attributes(value: object) -> dict[Any, Any]:
    """Return a copy of an object's attributes; empty if it has none of its own."""
    return dict((not isinstance(value, type) and instance_dict(value)) or {})


def _holds(value: object) -> bool:
    return container_base(value) is not None or is_kind(value, tuple)


def _tensors(torch: Any, value: object) -> Iterator[Any]:
    """Yield the tensors in a value: the value itself, or those in nested containers up to `_DEPTH`."""
    return tensors_in(torch, value, _items, depth=_DEPTH, most=_VALUES)


def _items(value: Any) -> list[object]:
    if is_kind(value, tuple):
        return list(tuple.__iter__(value))[:_ITEMS]
    base = container_base(value)
    if base is None or base is bytearray:
        return []
    return list(dict.values(value) if base is dict else base.__iter__(value))[:_ITEMS]  # type: ignore[attr-defined] # a container


def _uses(roots: Sequence[Any]) -> int:
    """Return how often graphs use a parameter: the median of the parameters, the lower of two.

    A layer that a model applies several times counts as often. Most layers of most models are applied once,
    so that the number is that of the forward passes.
    """
    seen = {id(each): each for each in roots}  # keeps the nodes, and so their identities
    waiting = deque(seen.values())
    edges: Counter[int] = Counter()
    while waiting and len(seen) < _NODES:
        for node, _ in waiting.popleft().next_functions:
            if node is None:
                continue
            if node.name().endswith("AccumulateGrad"):
                edges[id(node)] += 1
                seen[id(node)] = node
            elif id(node) not in seen:
                seen[id(node)] = node
                waiting.append(node)
    # The lower median.
    return sorted(edges.values())[(len(edges) - 1) // 2] if edges else 0
