"""Memory that each owner keeps alive."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from memlog.leaks.autograd_graphs import NODE_BYTES
from memlog.leaks.containers import ContainerGrowth
from memlog.leaks.owner_text import Owner
from memlog.leaks.watched_storages import WatchedStorage

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
    for one in held:
        owner, growth = one.owner, one.growth
        key: object = id(one)
        if owner is not None and growth is not None and owner.expression:
            key = (_SUBSCRIPT.sub("[…]", owner.expression), owner.root, growth.base)
        before = groups.get(key)
        groups[key] = one if before is None else _joined(before, one)
    return list(groups.values())


def _joined(one: Held, other: Held) -> Held:
    gained = sum(each.growth.gained for each in (one, other) if each.growth is not None)
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
