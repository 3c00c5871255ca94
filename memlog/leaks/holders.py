"""Holders of growing memory: descriptions, the bytes that each keeps alive, and texts of findings."""

from __future__ import annotations

import gc
import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from memlog._internal.inert_access import bases, is_kind, type_name
from memlog._internal.terminal import format_bytes
from memlog.leaks import assignment_lines
from memlog.leaks.assignment_lines import Addition
from memlog.leaks.autograd_graphs import NODE_BYTES
from memlog.leaks.containers import ContainerGrowth, filled
from memlog.leaks.owner_text import HOOKS, PYPLOT_FIGURES, Owner, program_files
from memlog.leaks.watched_storages import WatchedStorage

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

    ``title`` names the holder and the memory that it keeps, and ``confidence`` is the confidence that the
    title is true. ``where`` is a file and a line, such as ``train.py:31``; ``None`` if unknown. The holder
    gains ``bytes_per_step``; 0 if unknown. ``remedy`` is ``None`` if unknown. A container with a limit,
    such as a ``deque`` with a ``maxlen``, can still gain ``bytes_left``; ``None``: it has no known limit.
    ``container`` is a container's identity, its length at the end of the search, and the elements that it
    gained per step; ``None``: it is none alone. ``is_chain`` is true for a variable without elements, whose
    value keeps what was there before.
    """

    kind: HolderKind
    title: str
    where: str | None
    bytes_per_step: float
    evidence: tuple[str, ...]
    confidence: Confidence
    remedy: str | None
    bytes_left: float | None = None
    container: tuple[int, int, float] | None = None
    is_chain: bool = False


def per_step(holders: Sequence[Holder]) -> float:
    """Return the bytes per step that all holders gain together."""
    return sum(holder.bytes_per_step for holder in holders)


_SUBSCRIPT: Final = re.compile(r"\[[^]]*\]")


class Held(NamedTuple):
    """Memory that one owner keeps alive. The watched iterations allocated the memory.

    `memlog.leaks.holder_search` watches the new storages of these iterations.

    Attributes:
        owner: The owner; ``None`` if unknown.
        growth: Growth of the owner's container; ``None`` if the owner has no container that grows.
        iterations: Number of watched iterations.
        storages: Watched storages by identity.
        sizes: Bytes of all kept storages, by the storage's identity.
        own_bytes: Bytes of the storages in ``sizes`` that kept tensors have. Only graphs keep the others.
        nodes: Number of kept nodes of autograd graphs.
        traceback_bytes: Bytes of the tracebacks that anomaly detection keeps with these nodes.
        is_gradient: True if parameters' gradients keep the memory.
        cycles_made_at: Line that called ``backward(create_graph=True)``. After such a call, parameters and
            their gradients keep each other alive. Empty if there was no such call, or if the owner is known.
        scalar: True if the kept tensor is a scalar.
        are_views: True if the kept tensors are small parts of larger ones, which they keep.
        element_rate: Bytes per step that the container gains in objects other than watched tensors.
        cut_short: True if the search for owners was cut short.
        containers: Number of growing containers that are counted together, because their descriptions are
            equal, for example several values of a dictionary.
        part: Elements that the container gained per step since the first census, divided by those per watched
            iteration. Below 1 if it gains one every few steps, and the watched iterations saw one by chance.
    """

    owner: Owner | None
    growth: ContainerGrowth | None
    iterations: int
    storages: dict[int, WatchedStorage] = {}  # noqa: RUF012 - never changed
    sizes: dict[int, int] = {}  # noqa: RUF012 - never changed
    own_bytes: int = 0
    nodes: int = 0
    traceback_bytes: int = 0
    is_gradient: bool = False
    cycles_made_at: str = ""
    scalar: bool = False
    are_views: bool = False
    element_rate: float = 0.0
    cut_short: bool = False
    containers: int = 1
    part: float = 1.0

    @property
    def bytes_per_step(self) -> float:
        kept = sum(self.sizes.values()) + self.nodes * NODE_BYTES + self.traceback_bytes
        return self.part * kept / self.iterations + self.element_rate

    @property
    def graph_bytes_per_step(self) -> float:
        """Bytes that ``.detach()`` frees: those that only graphs keep."""
        if not self.nodes:
            return 0.0
        own = self.part * self.own_bytes / self.iterations
        return self.bytes_per_step - own - self.element_rate


def with_equals_joined(held: Iterable[Held]) -> list[Held]:
    """Return ``held``, with items joined if their growing containers have the same description.

    The containers of one container count as equal, such as ``outputs['fc1']`` and ``outputs['fc2']``.
    """
    groups: dict[object, Held] = {}
    for item in held:
        owner, growth = item.owner, item.growth
        key: object = id(item)
        if owner is not None and growth is not None and owner.expression:
            key = (_SUBSCRIPT.sub("[…]", owner.expression), owner.root, growth.base)
        before = groups.get(key)
        groups[key] = item if before is None else _joined(before, item)
    return list(groups.values())


def _joined(one: Held, other: Held) -> Held:
    gained = sum(item.growth.gained for item in (one, other) if item.growth is not None)
    return one._replace(
        growth=None if one.growth is None else one.growth._replace(gained=gained),
        storages={**one.storages, **other.storages},
        sizes={**one.sizes, **other.sizes},
        own_bytes=one.own_bytes + other.own_bytes,
        nodes=one.nodes + other.nodes,
        traceback_bytes=one.traceback_bytes + other.traceback_bytes,
        is_gradient=one.is_gradient or other.is_gradient,
        scalar=one.scalar or other.scalar,
        are_views=one.are_views or other.are_views,
        element_rate=one.element_rate + other.element_rate,
        containers=one.containers + other.containers,
    )


ALSO: Final = 0.2
"""If at least this part of the bytes stays after ``.detach()``, the remedy tells what to do about it."""
FOR_TRACEBACK: Final = (
    "Keep `str(error)` in place of the exception, whose traceback keeps variables."
)
FOR_LIMIT: Final = "Lower its limit, or keep smaller elements, or keep them on disk."
FOR_VIEWS: Final = "Keep copies (`.clone()`): views of a larger tensor keep all of it."
FILLS: Final = 3.0
"""A container whose length the program limits is taken to gain at most this multiple of what it holds: how
far it will fill is for the program to know."""
GRAPH_OF_STEP: Final = "Each keeps the graph of its step alive"
_MOSTLY: Final = 0.5
"""A layer is named only if it has made at least this fraction of the kept bytes."""


def holder_of(held: Held, steps: int) -> Holder:
    """Return the description of a holder, with its title, evidence and remedy.

    ``steps`` is the number of steps over which the growth of the owner's container was counted.
    """
    kind = _kind(held)
    made = held.cycles_made_at or _made_at(held)
    added = None if held.owner is None else addition(held.owner)
    where = None if added is None else assignment_lines.shown(added[0], added[1].line)
    where = where or (made.partition(" ")[0].rstrip(":") if made else None)
    where = where or (None if held.owner is None else cached_at(held.owner))
    has_container = held.owner is not None and held.owner.container is not None
    limited = limited_at(held.owner, added) if has_container else None
    left = _bytes_left(held, steps)
    if left is None and limited is not None:
        left = FILLS * held.bytes_per_step * steps
        if (
            held.growth is not None
        ):  # otherwise it was empty before, such as a list at an epoch's begin
            left *= filled(held.growth.container, held.growth.base) / held.growth.gained
    subject = _subject(held, kind, where, function_elsewhere(held.owner, added), steps)
    title = " ".join(sentence for sentence in (subject, _kept(held, kind)) if sentence)
    return Holder(
        kind,
        title,
        where,
        held.bytes_per_step,
        (*_evidence(held, made, steps), *limit_text(limited)),
        _confidence(held),
        _remedy(held, kind, added[1].value if added is not None else ""),
        left,
        _container(held, steps),
        held.owner is not None and held.growth is None,
    )


def _container(held: Held, steps: int) -> tuple[int, int, float] | None:
    growth = held.growth
    if growth is None or held.containers > 1 or growth.base is bytearray:
        return None
    length = filled(growth.container, growth.base)
    return id(growth.container), length, growth.gained / steps


def _bytes_left(held: Held, steps: int) -> float | None:
    growth = held.growth
    room = None if held.owner is None else held.owner.cache_room
    if room is not None and held.storages:
        results = len({storage.iteration for storage in held.storages.values()})
        return room * sum(held.sizes.values()) / results
    if growth is None or growth.base is not deque or held.containers > 1:
        return None
    most = deque.maxlen.__get__(growth.container)
    size = held.bytes_per_step * steps / growth.gained
    return None if most is None else (most - deque.__len__(growth.container)) * size


def _kind(held: Held) -> HolderKind:
    if held.is_gradient or held.cycles_made_at:
        return "gradients_not_cleared"
    of_owner = None if held.owner is None else _kind_of_owner(held.owner)
    if of_owner is not None:
        return of_owner
    if _is_of_graphs(held):
        inside = [storage.site for storage in held.storages.values() if storage.site.inside_module]
        evaluating = inside and all(site.evaluating for site in inside)
        return "forward_without_backward" if evaluating else "kept_graph"
    tensors = sum(held.sizes.values()) / held.iterations
    is_of_tensors = _has_tensors_for_elements(held) or tensors >= held.element_rate
    return "kept_tensors" if is_of_tensors else "growing_container"


def _has_tensors_for_elements(held: Held) -> bool:
    return bool(held.storages) and held.owner is not None and len(held.owner.between) <= 1


def _is_of_graphs(held: Held) -> bool:
    """Return True if graphs keep most of the bytes, so that ``.detach()`` frees them."""
    return held.graph_bytes_per_step > held.bytes_per_step / 2


def _kind_of_owner(owner: Owner) -> HolderKind | None:
    if owner.root.kind == "cycle":
        return "reference_cycles"
    if HOOKS in owner.name:
        return "hooks_pile_up"
    if any(is_kind(value, torch.optim.Optimizer) for value in owner.between):
        return "optimizers_pile_up"
    return (
        "model_copies" if any(is_kind(value, torch.nn.Module) for value in owner.between) else None
    )


def _subject(held: Held, kind: HolderKind, where: str | None, function: str, steps: int) -> str:
    owner = held.owner
    at = f" ({where})" if where else ""
    made = f"Tensors made at {where}" if where else "Tensors"
    if kind == "gradients_not_cleared":
        if held.cycles_made_at and not held.is_gradient:
            return f"Parameters and their gradients keep each other alive: the gradients have graphs{at}."
        return f"Parameters' gradients keep the graphs of earlier steps{at}."
    if owner is None:
        unknown = "" if held.cut_short else "; no Python object is known that holds them"
        return f"{made} stay alive{unknown}."
    if kind == "reference_cycles":
        idle = "" if gc.isenabled() else ", which is switched off"
        return f"{made} wait in reference cycles for Python's garbage collector{idle}."
    place = f" {owner.place}" if owner.place else ""
    described = f"`{owner.expression}`" if owner.expression else "An object"
    if _is_nameless(owner):
        described = f"A `{owner.expression}` that no known variable holds"
    if held.growth is None:
        if owner.expression:
            # In a linked list, how often the link is followed says nothing: `last.next….value`.
            contents = re.sub(r"(\.\w+)\1{2,}", r"\1…", owner.contents)
            described = f"`{owner.expression}{contents}`"
        return f"{described}{place}{at} keeps what earlier steps made."
    subject, gains = f"{described}, {owner.kind or 'an object'}", "gains"
    if held.containers > 1:
        containers = f"{held.containers} containers ({type_name(owner.container)})"
        subject, gains = f"{described} and the like, {containers}", "gain"
    here, there = (place, f" in `{function}()`{at}") if function else (f"{place}{at}", "")
    return f"{subject}{here}, {gains} {_gain(held, kind, steps)}{there}."


def _is_nameless(owner: Owner) -> bool:
    """Return True if C code refers to the owner, and no statement of the program adds to it."""
    return owner.root.kind == "unnamed" and not owner.root.place and addition(owner) is None


def _gain(held: Held, kind: HolderKind, steps: int) -> str:
    owner, growth = held.owner, held.growth
    if owner is None or growth is None:
        return ""
    noun = {
        "hooks_pile_up": "hook",
        "optimizers_pile_up": "optimizer",
        "model_copies": "module",
    }.get(kind, "tensor" if _has_tensors_for_elements(held) else "element")
    if growth.base is bytearray:
        noun = "byte"
    elif owner.container is None:  # what grows is the dictionary of an object's attributes
        noun = "attribute"
    rate = growth.gained / steps
    if round(rate, 1) == 1:
        return f"one {noun} per step"
    if rate > 1:
        return f"{rate:,.0f} {noun}s per step"
    return f"{growth.gained} {noun}s in {steps} steps"


def _kept(held: Held, kind: HolderKind) -> str:
    size = f"{format_bytes(held.bytes_per_step)} per step"
    made = len({storage.iteration for storage in held.storages.values()})
    if held.growth is None and made == 1 < held.iterations:
        # Such as at an evaluation. How often that comes is unknown.
        size = f"{format_bytes(held.bytes_per_step * held.iterations)} at one of {held.iterations} steps"
    if _is_of_graphs(held):
        layer = _layer(held)
        mostly = f", mostly activations of `{layer}`" if layer else ""
        if held.growth is not None:
            return f"{GRAPH_OF_STEP} ({size}{mostly})."
        return f"They keep autograd graphs alive ({size}{mostly})."
    through = ""
    if kind == "kept_tensors" and _has_traceback(held):
        through = " through the traceback of an exception"
    return f"That keeps {size}{through}."


def _layer(held: Held) -> str | None:
    sizes: Counter[str] = Counter()
    for storage in held.storages.values():
        if storage.site.inside_module:
            sizes[storage.site.layer] += storage.size
    if not sizes:
        return None
    layer, size = sizes.most_common(1)[0]
    return layer if size >= _MOSTLY * sum(held.sizes.values()) else None


def _has_traceback(held: Held) -> bool:
    owner = held.owner
    return owner is not None and any(
        type(value) is TracebackType for value in (*owner.between, *owner.above)
    )


def _made_at(held: Held) -> str:
    """Return the program's line that made most of the kept bytes; empty if unknown."""
    sizes: Counter[str] = Counter()
    for storage in held.storages.values():
        if storage.site.line:
            sizes[storage.site.line] += storage.size + 1
    return sizes.most_common(1)[0][0] if sizes else ""


def cached_at(owner: Owner) -> str | None:
    """Return the line of the cached function if the owner is a cache; otherwise ``None``."""
    function = owner.cached_function
    code = None if function is None else function.__code__
    return None if code is None else assignment_lines.shown(code.co_filename, code.co_firstlineno)


def function_elsewhere(owner: Owner | None, added: tuple[str, Addition] | None) -> str:
    """Return the function that adds to an owner, if a variable of another function leads to it."""
    if owner is None or added is None or owner.root.kind != "local":
        return ""
    functions = added[1].functions
    return functions[-1] if functions and owner.root.place not in functions else ""


def limited_at(owner: Owner | None, added: tuple[str, Addition] | None) -> str | None:
    """Return the line that limits an owner's length, such as ``train.py:31``; ``None`` if there is none."""
    if owner is None or added is None:
        return None
    file, statement = added
    line = assignment_lines.limiting_line(file, owner.name or owner.root.name, statement.line)
    return None if line is None else assignment_lines.shown(file, line)


def limit_text(limited: str | None) -> tuple[str, ...]:
    return () if limited is None else (f"its length has a limit in the program ({limited})",)


def addition(owner: Owner) -> tuple[str, Addition] | None:
    """Return the statement that adds to an owner, with its file; ``None`` if unknown.

    Several classes and functions can use the same name. Those of the owner are preferred.
    """
    if not owner.name:
        return None
    files = program_files(owner)
    calls = assignment_lines.registrations if HOOKS in owner.name else None
    if _is_of_optimizer(owner):
        calls = assignment_lines.added_groups
    if calls is not None:
        return next(((file, statement) for file in files for statement in calls(file)), None)
    classes = {
        type.__dict__["__name__"].__get__(base)
        for value in owner.above
        for base in bases(type(value))
    }
    for name in dict.fromkeys((owner.name, owner.root.name)):
        statements = [
            (file, statement)
            for file in files
            for statement in assignment_lines.additions(file, name)
        ]
        # Preferred are methods of the owner's class, or for a variable, the function that has it.
        home = classes if name != owner.root.name else {owner.root.place}
        own = (
            pair for pair in statements if home.intersection((*pair[1].classes, *pair[1].functions))
        )
        if statements:
            return next(own, statements[0])
    return None


def _is_of_optimizer(owner: Owner) -> bool:
    """Return whether an owner belongs to an optimizer, as an optimizer's state does."""
    return any(is_kind(value, torch.optim.Optimizer) for value in owner.above)


def _evidence(held: Held, made: str, steps: int) -> tuple[str, ...]:
    evidence = []
    if held.storages:
        count = len(held.storages)
        evidence.append(
            f"{count} storages of {held.iterations} watched iterations are alive several steps later"
        )
        largest = max(held.storages.values(), key=lambda storage: storage.size)
        evidence.append(
            f"the largest: {largest.dtype} {list(largest.shape)}, {format_bytes(largest.size)}, "
            f"made in {largest.site.phase}"
            + (f" of {largest.site.layer}" if largest.site.inside_module else "")
        )
    if held.cycles_made_at:
        evidence.append(f"`backward(create_graph=True)` was called at {made}")
    elif made:
        evidence.append(f"made at {made}")
    if held.nodes:
        evidence.append(f"{held.nodes // held.iterations} graph nodes of each step are alive")
    if held.nodes and held.own_bytes:
        evidence.append(
            f"tensors themselves hold {format_bytes(held.own_bytes / held.iterations)} per step; only graphs "
            f"hold {format_bytes(held.graph_bytes_per_step)}, which `.detach()` frees"
        )
    if held.traceback_bytes:
        size = format_bytes(held.traceback_bytes / held.iterations)
        evidence.append(
            f"anomaly detection (`torch.autograd.set_detect_anomaly`) is on and keeps {size} of tracebacks "
            "with each step's nodes"
        )
    if held.growth is not None:
        evidence.append(f"{held.growth.gained} more elements after {steps} steps")
    owner = held.owner
    above = () if owner is None or held.growth is not None else owner.above
    if owner is not None and (above or len(owner.between) > 1):
        chain = (*above, owner.container, *owner.between)
        names = [type_name(value) for value in chain if value is not None]
        evidence.append("held through " + " < ".join(reversed(names)))
    return tuple(evidence)


def _confidence(held: Held) -> Confidence:
    owner = held.owner
    if owner is None:
        return "high" if held.is_gradient else "medium" if held.cycles_made_at else "low"
    if owner.root.kind == "cycle":
        # If the collector is on, it can still free the cycles.
        return "medium" if gc.isenabled() else "high"
    return "high" if held.growth is not None and owner.root.name else "medium"


def _remedy(held: Held, kind: HolderKind, value: str) -> str | None:
    if kind == "kept_graph":
        rest = held.bytes_per_step - held.graph_bytes_per_step
        if rest >= ALSO * held.bytes_per_step:
            return f"{_remedy_for_graph(held, value)} {also_tensors(rest)}"
        return _remedy_for_graph(held, value)
    of_owner = None
    if held.owner is not None and kind in ("kept_tensors", "growing_container"):
        of_owner = remedy_for_owner(held.owner)
    if of_owner is None and kind == "kept_tensors" and _has_traceback(held):
        return FOR_TRACEBACK
    if of_owner is None and kind == "kept_tensors" and held.are_views:
        return FOR_VIEWS
    return of_owner or REMEDIES.get(kind)


def also_tensors(rate: float) -> str:
    """Return what to do about the part that is left after ``.detach()``, in bytes per step."""
    return (
        f"The tensors themselves hold {format_bytes(rate)} per step: keep fewer, or only numbers."
    )


def _remedy_for_graph(held: Held, value: str) -> str:
    if held.growth is None:
        return "Cut the graph between steps with `.detach()`."
    return without_graph(value, is_scalar=held.scalar)


def without_graph(value: str, *, is_scalar: bool) -> str:
    """Return what to keep in place of a tensor and its graph. ``value`` is the added value, or empty."""
    if not value:
        number = "its number (`.item()`) or " if is_scalar else ""
        return f"Keep only {number}a tensor without its graph (`.detach()`)."
    number = f"`{value}.item()` or " if is_scalar else ""
    return f"Append {number}`{value}.detach()`."


def remedy_for_owner(owner: Owner) -> str | None:
    """Return what to do if the owner is no plain container, such as a cache of ``functools``."""
    remedies = {
        "Give the cache a limit, or a smaller one (`functools.lru_cache(maxsize=…)`), or call its "
        "`cache_clear()`.": owner.cached_function is not None,
        "Close each figure that is no longer needed: `plt.close(figure)`.": (
            owner.root.place == PYPLOT_FIGURES
        ),
        "Give `LBFGS` a smaller `history_size`: it keeps two tensors for each of so many steps.": any(
            is_kind(value, torch.optim.LBFGS) for value in owner.above
        ),
        "What takes from the queue is slower than what puts into it: give the queue a `maxsize`, so that "
        "`put` waits, or put less into it.": owner.queue is not None,
        "`itertools.cycle` keeps all elements of the first pass. Begin again in a loop instead: `while True: "
        "yield from loader`.": owner.cycle is not None,
        "Make a new optimizer, or remove the parameters that are no longer trained from this one.": (
            _is_of_optimizer(owner)
        ),
        "Look for callbacks that are registered again and again, as by `atexit.register`.": (
            _is_nameless(owner)
        ),
    }
    return next((remedy for remedy, applies in remedies.items() if applies), None)


REMEDIES: Final[dict[str, str]] = {
    "forward_without_backward": "Run the evaluation under `torch.no_grad()`, or append `.detach()`.",
    "gradients_not_cleared": "Set the gradients to `None` after each step (`optimizer.zero_grad()`), "
    "or call `backward` without `create_graph=True`.",
    "hooks_pile_up": "Register the hook once, or call `remove()` on the handle that registering returns.",
    "optimizers_pile_up": "Make the optimizer once, or drop the references to old ones.",
    "model_copies": "Keep a few copies only, or save them to files.",
    "reference_cycles": "Break the cycle, or call `gc.collect()` now and then.",
    "kept_tensors": "Remove what is no longer needed, limit its length, or keep `.item()` or a copy on disk.",
    "growing_container": "Remove old elements, or limit its length.",
}  # fmt: skip
