"""Search for the holders of growing memory over some steps of training, and the report on what they hold.

1. Watch the storages that a few whole iterations make. An iteration lasts from the end of one optimizer step
   to the end of the next.
2. Several steps later, find the owner of each storage that is still alive, and the line that made this
   storage. Also find the containers that have grown meanwhile.
3. If these holders explain less than half of the growth, run ``tracemalloc`` for some steps.

From step to step, the search keeps only weak references and numbers.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.inert_access import CONTAINERS
from memlog.leaks.assignment_lines import parsing_once
from memlog.leaks.autograd_graphs import GraphWalk, KeptGraph
from memlog.leaks.containers import Census, ContainerGrowth, element_size, growing, newest_elements
from memlog.leaks.holders import Held, Holder, addition, holder_of, with_equals_joined
from memlog.leaks.live_tensors import (
    MODEL_PARTS,
    VIEWS,
    KnownModels,
    LiveTensors,
    gradients_with_graph,
    is_scalar,
    parts_of_training,
    shown_bytes,
    views_of,
)
from memlog.leaks.other_causes import AllocationTrace, SizesAtEnds
from memlog.leaks.owner_chain import Chain, OwnerSearch
from memlog.leaks.owner_text import Owner, describe, describe_container
from memlog.leaks.process_objects import TimeBudget, all_objects, objects_of
from memlog.leaks.watched_storages import Site, StorageWatch, WatchedStorage, may_watch
from memlog.torchside.tensors import DisableTorchFunction, TensorBase

WATCHED: Final = 4
"""Number of iterations whose storages are watched."""
LATER: Final = 9
"""Number of steps between the watched iterations and the search for storages that are still alive.

The number is odd. A list that is replaced in each step alternates between two addresses. After an even number
of steps, memlog would confuse the new list with an earlier list and overlook the growth.
"""
_TRACED: Final = 5
"""Number of steps in each half of the trace with ``tracemalloc``."""
_PART_AT_ONCE: Final = 1 / 3
"""When the search has taken this fraction of ``budget_seconds`` in one step, it stops its work in this
step."""
_MOST_AT_ONCE: Final = 3.0
"""When the search has taken this number of processor seconds in one step, it stops its work in this step."""
_TRACING_SECONDS: Final = 0.3
"""Processor seconds by which ``tracemalloc`` may make all steps together longer."""
_ENOUGH: Final = 0.5
"""If the holders explain less than this fraction of the growth, ``tracemalloc`` runs."""


class HolderSearch:
    """Search for the holders of growing memory. Each object runs a single search.

    Call `step_ended` on the training thread. If the search fails, it ends, and training goes on.

    ``budget_seconds`` is the processor time that the search may take on the training thread, without the
    time by which ``tracemalloc`` slows the program down (`_TRACING_SECONDS`). ``rate`` is the growth to
    explain, in bytes per step. If ``rate`` is 0, ``tracemalloc`` does not run. `WATCHED` and `LATER` describe
    ``watched`` and ``later``.

    Attributes:
        holders: The holders found so far, the fastest growth first. Those from ``tracemalloc`` come last.
        complete: True if the search looked at everything before its time was spent.
    """

    def __init__(
        self,
        *,
        budget_seconds: float,
        diagnostics: Diagnostics,
        rate: float,
        watched: int = WATCHED,
        later: int = LATER,
    ) -> None:
        self._budget_seconds = budget_seconds
        self._budget = TimeBudget(budget_seconds)
        self._diagnostics = diagnostics
        self._rate = rate
        self._watched, self._later = watched, later
        self._step_seconds = min(budget_seconds * _PART_AT_ONCE, _MOST_AT_ONCE)
        self._begun_at: int | None = None
        self._ended_at = 0
        self._traced_from = 0
        self._watch: StorageWatch | None = None
        self._normal: KnownModels | None = None
        self._censuses: list[Census] = []
        self._sizes = SizesAtEnds()
        self._trace: AllocationTrace | None = None
        self._waited: list[float] = []
        """Processor time of the process at the ends of steps in which the search only waits."""
        self.holders: tuple[Holder, ...] = ()
        self.complete = False
        self._finished = False
        self._lock = threading.Lock()

    def step_ended(self, step: int) -> bool:
        """Continue the search after an optimizer step. Return True if the search is finished."""
        # Several threads can train. A thread that does not get the lock at once returns.
        if self._finished or not self._lock.acquire(blocking=False):
            return self._finished
        try:
            with self._budget.running(self._step_seconds):
                self._go_on(step)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._finished = True
            self._diagnostics.fault("looking for what holds memory", error)
        finally:
            self._lock.release()
            if self._finished:
                self.stop()  # again: another thread can have called `stop` during this step's search
        return self._finished

    @property
    def begun(self) -> bool:
        """True from the first call of `step_ended` on."""
        return self._begun_at is not None

    @property
    def seconds(self) -> float:
        """Processor time that the search has taken so far."""
        return self._budget_seconds - self._budget.left_in_all

    def stop(self) -> None:
        """End the search, and remove its hooks, modes and references. A second call is harmless."""
        self._finished = True
        # Removed first: another thread can call `stop` at the same time.
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
        self._censuses.clear()
        self._normal = None

    def _go_on(self, step: int) -> None:
        # Each of the first parts looks at all objects once, so that none makes a step much longer.
        if self._trace is not None:
            self._go_on_tracing(step, self._trace)
        elif self._begun_at is None:
            self._begun_at = step
            self._censuses = [Census(objects_of(*CONTAINERS), self._budget)]
        elif self._watch is None:
            self._begin_watching()
        elif not self._ended_at:
            self._go_on_watching(step, self._watch)
        elif step - self._ended_at >= self._later:
            self._look(step, self._watch)
        else:
            self._waited.append(time.process_time())

    def _begin_watching(self) -> None:
        self._normal = KnownModels(objects_of(*MODEL_PARTS), self._budget)
        if self._budget.spent:
            self.stop()
            return
        # The other half is for the search for owners.
        most = min(self._budget.left_in_all / 2, self._step_seconds)
        self._watch = StorageWatch(self._diagnostics, self._normal.existing, most)
        if may_watch():  # otherwise only containers are compared
            self._watch.begin()

    def _go_on_watching(self, step: int, watch: StorageWatch) -> None:
        # First, because `iteration_ended` increases the iteration's number.
        self._sizes.add(watch.alive().values(), watch.iteration)
        watch.iteration_ended()
        if watch.iteration >= self._watched or watch.ended:
            watch.end()
            self._budget.take(watch.seconds)
            self._ended_at = step
            self._censuses.append(Census(objects_of(*CONTAINERS), self._budget))

    def _look(self, step: int, watch: StorageWatch) -> None:
        steps = step - (self._begun_at or 0)
        if self._normal is not None:
            report = HolderReport(watch, self._censuses, self._normal, steps, self._budget)
            holders = (*report.holders(), *self._sizes.holders())
            self.holders = tuple(sorted(holders, key=lambda holder: -holder.bytes_per_step))
        self._watch = self._normal = None
        self._censuses = []
        explained = sum(holder.bytes_per_step for holder in self.holders)
        if explained >= _ENOUGH * self._rate:
            self.complete = not self._budget.spent
            self.stop()
            return
        usual = [after - before for before, after in pairwise(self._waited)]
        self._trace = AllocationTrace(median(usual) if usual else 0.0, _TRACING_SECONDS)
        self._traced_from = step
        if not self._trace.start():
            self.stop()

    def _go_on_tracing(self, step: int, trace: AllocationTrace) -> None:
        slower_by = max(trace.slower_by, 0.0)
        if not trace.running:
            self._budget.take(slower_by)
            self.stop()
        elif step - self._traced_from == _TRACED:
            trace.mark_middle()
        elif step - self._traced_from >= 2 * _TRACED:
            holders = trace.finish(_TRACED)
            least = _ENOUGH * self._rate / 2
            self.holders += tuple(holder for holder in holders if holder.bytes_per_step >= least)
            self.complete = not self._budget.spent
            self._budget.take(slower_by)
            self.stop()
        trace.step_ended()


_MAX_TARGETS: Final = 16
"""Maximum number of graphs whose owners memlog searches for. The same limit applies to sites and to
containers. memlog takes those that keep or gain the most bytes."""
_MAX_VIEWS: Final = 4
"""memlog searches for the owners of at most this number of tensors per storage."""
_MAX_SHARERS: Final = 64
"""Maximum length of `_Target.sharers`."""
_MAX_HOLDERS: Final = 5
_SPREAD: Final = 0.4
"""A graph with nodes over this part of the watched iterations is of several of them."""
_MAX_MEASURED: Final = 200
"""Maximum number of containers whose elements are measured."""
_MAX_ELEMENTS: Final = 1000
"""Maximum number of elements of one container that are looked up."""
_LEAST: Final = 64.0
"""If an owner gains fewer bytes per step than this, it is not reported."""
_SEVERAL: Final = 2
"""Storages show growth of their owner only if at least this number of watched iterations made them."""


class _Target(NamedTuple):
    """Group of similar graphs, or of similar storages, whose owner memlog searches for.

    Graphs are similar if they have the same last operation and the same number of nodes. Storages are similar
    if they were made at the same `Site`.

    ``spans`` is true for one graph that has tensors of several iterations: it grows, although its owner's
    container does not. ``holders`` are tensors or one autograd node. The first owner that memlog finds for a
    holder is the owner of the group. ``sharers`` are other tensors and nodes whose graphs have nodes in
    common with a holder's graph. The other fields have the same meanings as in `Held`.
    """

    holders: list[Any]
    storages: dict[int, WatchedStorage]
    sizes: dict[int, int]
    nodes: int = 0
    traceback_bytes: int = 0
    is_gradient: bool = False
    sharers: Sequence[Any] = ()
    spans: bool = False
    are_views: bool = False


class _Measured(NamedTuple):
    """A container that grows, with the bytes of objects and of storages that it gains per step."""

    growth: ContainerGrowth
    objects: float
    storages: float


class HolderReport:
    """One search for the owners of storages that are still alive after the watched iterations.

    ``watch`` has recorded the new storages of the watched iterations. ``censuses`` were taken before and
    after the watched iterations. ``normal`` has the parameters and optimizers that existed at the first
    census. ``steps`` is the number of steps since the first census.
    """

    def __init__(
        self,
        watch: StorageWatch,
        censuses: Sequence[Census],
        normal: KnownModels,
        steps: int,
        budget: TimeBudget,
    ) -> None:
        self._watch = watch
        self._steps = max(1, steps)
        self._iterations = max(1, watch.iteration)
        self._budget = budget
        # The censuses are dictionaries, which the collector tracks, too.
        ours = {id(census.lengths) for census in censuses}
        self._objects = all_objects()
        grown = growing(self._objects, censuses, budget)
        self._grown = [growth for growth in grown if id(growth.container) not in ours]
        self._growing = frozenset(id(growth.container) for growth in self._grown)
        # Containers that the watched iterations made are left out. Such a container, for example a batch's
        # dictionary, can be an element of a container that grows.
        self._known = frozenset(censuses[0].lengths.keys() & censuses[-1].lengths.keys())
        self._huge = censuses[-1].huge
        parts = parts_of_training(self._objects, budget)
        self._parameters = normal.parameters(parts, budget)
        self._usual = usual = normal.storages(self._parameters)
        self._alive = {key: storage for key, storage in watch.alive().items() if key not in usual}
        self._own: set[int] = set()
        """Watched storages of tensors that the program keeps, not only their graphs."""
        self._tensors = LiveTensors(parts, frozenset(self._alive), watch.first_node, budget)

    def holders(self) -> tuple[Holder, ...]:
        """Return descriptions of the owners, the fastest growth first. Call this method only once."""
        try:
            with parsing_once():
                return self._find()
        finally:
            # The list contains this report. This reference cycle would keep all objects alive.
            self._objects.clear()

    def _find(self) -> tuple[Holder, ...]:
        graphs = self._graph_targets()
        targets = [*graphs, *self._tensor_targets(graphs)]
        containers = self._measured_containers()
        # The lists and tuples of memlog that refer to the holders are no owners of them.
        own: list[Any] = [self._objects, self._parameters, self._grown, containers, targets, graphs]
        own += [*self._tensors.own, *self._grown, *containers, *targets]
        own += [objects for target in targets for objects in (target.holders, target.sharers)]
        search = OwnerSearch(self._budget, own, self._growing)
        held = self._held(search, targets)
        held = with_equals_joined(self._with_containers(search, containers, held))
        held = [group._replace(part=self._part(group)) for group in held]
        largest = sorted(held, key=lambda group: -group.bytes_per_step)[:_MAX_HOLDERS]
        return tuple(
            holder_of(group, self._steps) for group in largest if group.bytes_per_step >= _LEAST
        )

    def _part(self, held: Held) -> float:
        gained = self._steps if held.growth is None else held.growth.gained
        watched = len({storage.iteration for storage in held.storages.values()})
        if not watched or gained >= self._steps:
            return 1.0
        return min(1.0, (gained / self._steps) / (watched / self._iterations))

    def _graph_targets(self) -> list[_Target]:
        """Return a `_Target` for each group of similar graphs that the watched iterations made."""
        first, end = self._watch.first_node, self._watch.end_node
        if first is None or end is None:
            return []
        gradients = gradients_with_graph(self._parameters)
        self._tensors.add_roots(gradients, first)
        ours = {id(gradient) for gradient, _ in gradients}
        sorts: defaultdict[tuple[str, int], list[KeptGraph]] = defaultdict(list)
        for graph in GraphWalk(first, end, self._budget).graphs(self._tensors):
            sorts[graph.operation, graph.nodes].append(graph)
        targets = []
        for graphs in sorts.values():
            sizes = {
                key: size
                for graph in graphs
                for key, size in graph.storages.items()
                if key not in self._usual
            }
            holder = graphs[len(graphs) // 2].holder
            watched = {key: self._alive[key] for key in sizes if key in self._alive}
            nodes = sum(graph.nodes for graph in graphs)
            traces = sum(graph.traceback_bytes for graph in graphs)
            sharers = graphs[0].sharers[:_MAX_SHARERS] if len(graphs) == 1 else ()
            # A backward pass frees what the nodes have saved, so the nodes themselves tell, too.
            spans = any(
                graph.spread >= _SPREAD or self._recurs(self._watched(graph)) for graph in graphs
            )
            targets.append(
                _Target([holder], watched, sizes, nodes, traces, id(holder) in ours, sharers, spans)
            )
        return sorted(targets, key=_weight, reverse=True)[:_MAX_TARGETS]

    def _watched(self, graph: KeptGraph) -> list[WatchedStorage]:
        return [self._alive[key] for key in graph.storages.keys() & self._alive.keys()]

    def _tensor_targets(self, graphs: list[_Target]) -> list[_Target]:
        """Return a `_Target` for each `Site` whose storages are still alive, and each container of them.

        ``holders`` are tensors of the site's newest storage that has tensors with a Python object. If no
        storage has such tensors, ``holders`` is empty.
        """
        in_graphs = {key for target in graphs for key in target.sizes}
        sites: defaultdict[tuple[Site, int], dict[int, WatchedStorage]] = defaultdict(dict)
        containers = self._containers_of_elements()
        for key, storage in self._alive.items():
            views = self._tensors.by_storage.get(key, ())
            # A storage without a tensor in Python counts for the graph that keeps it.
            if views or key not in in_graphs:
                within = next((containers[id(view)] for view in views if id(view) in containers), 0)
                sites[storage.site, within][key] = storage
        targets = []
        for left in sites.values():
            known = [key for key in left if key in self._tensors.by_storage]
            # Take the newest storage. In a linked list, the newest node is usually nearest to a variable.
            views = self._tensors.by_storage[known[-1]] if known else []
            sizes = {key: storage.size for key, storage in left.items()}
            are_views = bool(known) and _shown_bytes(views) < VIEWS * sizes[known[-1]]
            targets.append(_Target(views[:_MAX_VIEWS], left, sizes, are_views=are_views))
        return sorted(targets, key=_weight, reverse=True)[:_MAX_TARGETS]

    def _containers_of_elements(self) -> dict[int, int]:
        """Return the container of each newest element of the containers that grow, by identity."""
        containers: dict[int, int] = {}
        others = [growth for growth in self._grown if growth.base is not bytearray]
        for growth in sorted(others, key=lambda growth: -growth.gained)[:_MAX_MEASURED]:
            count = min(growth.gained, _MAX_ELEMENTS)
            for element in newest_elements(growth.container, growth.base, count):
                value = element[1] if growth.base is dict else element
                containers[id(value)] = id(growth.container)
        return containers

    def _held(self, search: OwnerSearch, targets: list[_Target]) -> list[Held]:
        chains = self._chains(search, targets)
        groups: dict[object, Held] = {}
        taken: set[int] = set()
        unknown = []
        pairs = list(zip(targets, chains, strict=True))
        named = [target for target, chain in pairs if chain is not None and not target.nodes]
        self._own = {key for target in named for key in target.sizes}
        for target, chain in pairs:
            if chain is None and not target.is_gradient:
                unknown.append(target)
                continue
            owner = None if chain is None else describe(chain, self._growing)
            if owner is not None and target.sharers:
                owner = self._carrier(search, owner, target.sharers)
            if owner is None or self._may_grow(owner, target):
                self._join(groups, owner, target, taken)
            else:
                taken.update(target.sizes)
        # Last: a storage that a known owner keeps counts for that owner.
        for target in unknown:
            left = {key: storage for key, storage in target.storages.items() if key not in taken}
            if self._recurs(left.values()):
                self._join(groups, None, target._replace(storages=left, sizes={}, nodes=0), taken)
        cycles, short = self._watch.cycles_made_at, search.cut_short
        return [
            group._replace(cut_short=short, cycles_made_at="" if group.owner else cycles)
            for group in groups.values()
        ]

    def _carrier(self, search: OwnerSearch, owner: Owner, sharers: Sequence[Any]) -> Owner:
        """Return the variable to which the program adds in each step: ``owner`` or the owner of a sharer.

        If no such variable is found, return ``owner``. In a loop with ``out, state = cell(x, state)``, the
        result is ``state``, even if ``owner`` is ``out``.
        """
        if self._growth_of(owner) is not None or addition(owner) is not None:
            return owner
        chains = [chain for chain in search.chains(sharers) if chain is not None]
        owners = (describe(chain, self._growing) for chain in reversed(chains))
        return next((candidate for candidate in owners if addition(candidate) is not None), owner)

    def _chains(self, search: OwnerSearch, targets: list[_Target]) -> list[Chain | None]:
        """Return each target's chain of owners; ``None`` for a target without a chain.

        If no tensor of the target has a chain, use the chain of a numpy array that shares memory with a
        tensor.
        """
        objects = [holder for target in targets for holder in target.holders]
        chains = dict(zip(map(id, objects), search.chains(objects), strict=True))
        named = {
            key
            for target in targets
            if any(chains[id(holder)] is not None for holder in target.holders)
            for key in target.sizes
        }
        left = [
            holder
            for target in targets
            if not named.issuperset(target.sizes)
            for holder in target.holders
        ]
        if left:
            arrays = views_of(self._objects, left, self._huge, self._budget)
            samples = [views[0] for views in arrays.values()]
            chains |= dict(zip(arrays, search.chains(samples), strict=True))
        return [
            next(
                (chains[id(holder)] for holder in target.holders if chains[id(holder)] is not None),
                None,
            )
            for target in targets
        ]

    def _may_grow(self, owner: Owner, target: _Target) -> bool:
        """Return whether an owner can hold more with each step."""
        if any(id(container) in self._growing for container in owner.containers):
            return True
        if owner.root.kind != "cycle" and any(
            id(container) in self._known for container in owner.containers
        ):
            return (
                target.spans
            )  # the owner's container, such as a ring buffer, is old and has not grown
        return bool(target.nodes) or self._recurs(target.storages.values())

    def _recurs(self, storages: Iterable[WatchedStorage]) -> bool:
        """Return whether the storages were made in several iterations."""
        made = {storage.iteration for storage in storages}
        return len(made) >= min(_SEVERAL, self._iterations)

    def _join(
        self, groups: dict[object, Held], owner: Owner | None, target: _Target, taken: set[int]
    ) -> None:
        """Add a target's memory to the group of ``owner``.

        Storages in ``taken`` are counted already, so they are left out. The new storages are added to
        ``taken``.
        """
        key: object = target.is_gradient
        if owner is not None:
            key = id(owner.container) if owner.container is not None else owner.expression
            if owner.root.kind == "cycle":
                # Garbage has no names. All of it is one group.
                key = owner.root
        sizes = {**{key: storage.size for key, storage in target.storages.items()}, **target.sizes}
        new = {key: size for key, size in sizes.items() if key not in taken}
        taken.update(new)
        before = groups.get(key) or Held(owner, self._growth_of(owner), self._iterations)
        groups[key] = before._replace(
            storages={**before.storages, **target.storages},
            sizes={**before.sizes, **new},
            own_bytes=before.own_bytes + sum(new[key] for key in new.keys() & self._own),
            nodes=before.nodes + target.nodes,
            traceback_bytes=before.traceback_bytes + target.traceback_bytes,
            is_gradient=before.is_gradient or target.is_gradient,
            scalar=before.scalar or any(map(is_scalar, target.holders)),
            are_views=before.are_views or target.are_views,
        )

    def _growth_of(self, owner: Owner | None) -> ContainerGrowth | None:
        if owner is None or owner.container is None:
            return None
        return next((growth for growth in self._grown if growth.container is owner.container), None)

    def _measured_containers(self) -> list[_Measured]:
        """Return the containers that grow, each with its gain per step, the largest gain first."""
        largest = sorted(self._grown, key=lambda growth: -growth.gained)[:_MAX_MEASURED]
        measured = []
        for growth in largest:
            size, rate = element_size(growth, self._budget), growth.gained / self._steps
            measured.append(_Measured(growth, rate * size.objects, rate * size.storages))
        measured = [gain for gain in measured if gain.objects + gain.storages >= _LEAST]
        measured.sort(key=lambda gain: -gain.objects - gain.storages)
        return measured[:_MAX_TARGETS]

    def _with_containers(
        self, search: OwnerSearch, containers: list[_Measured], held: list[Held]
    ) -> list[Held]:
        """Return ``held`` with ``element_rate`` set. Add an item for each container that has none yet.

        If the owner of a container is unknown, the container gets no item.
        """
        measured = {id(gain.growth.container): gain for gain in containers}
        groups = []
        for group in held:
            container = None if group.owner is None else group.owner.container
            known = measured.pop(id(container), None)
            groups.append(group._replace(element_rate=0.0 if known is None else known.objects))
        left = list(measured.values())
        chains = search.chains([gain.growth.container for gain in left])
        for gain, chain in zip(left, chains, strict=True):
            if chain is not None and chain.root.kind != "cycle":
                owner = describe_container(chain)._replace(between=(), above=chain.objects[:-1])
                rate = gain.objects + gain.storages
                groups.append(Held(owner, gain.growth, self._iterations, element_rate=rate))
        return groups


def _weight(target: _Target) -> int:
    return sum(target.sizes.values()) + target.nodes + target.traceback_bytes


def _shown_bytes(tensors: list[Any]) -> int:
    """Return the bytes of tensors' elements. A tensor that only its views keep does not count."""
    with DisableTorchFunction():
        bases = {id(TensorBase._base.__get__(tensor)) for tensor in tensors}
        return sum(shown_bytes(tensor) for tensor in tensors if id(tensor) not in bases)
