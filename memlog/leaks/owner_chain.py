"""Chains of owners, from an object up to a name in the program.

Each call of ``gc.get_referrers`` looks at all tracked objects. This takes 50 ms for a million objects. So a
single call finds the referrers of a whole level. The first level has the objects whose owners are unknown.
The next level has their owners, and so on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
)
from typing import Any, Final, NamedTuple

from memlog._internal.inert_access import (
    class_namespace,
    instance_dict,
    is_kind,
    key_of,
    module_file,
)
from memlog.leaks.frame_variables import is_memlog, running_variables
from memlog.leaks.time_budget import TimeBudget
from memlog.tracer.attribution.calling_lines import CallingLines

_MAX_LEVELS: Final = 30
_SETTLED: Final = 5
"""Number of levels of owners: direct owners, owners of these, and so on. In these levels, only a chain
through a growing container ends the search. In later levels, any chain of owners ends the search."""
_MAX_FRONTIER: Final = 400
"""Maximum number of objects that are passed to one call of ``gc.get_referrers``. The search ignores further
objects. Then `OwnerSearch.cut_short` is true."""
_MAX_REFERRERS: Final = 4000
"""Maximum number of referrers that the search uses from one call of ``gc.get_referrers``. The search ignores
further referrers. Then `OwnerSearch.cut_short` is true."""
_LAST_RESORTS: Final = (
    (FunctionType, "__code__"),
    (GeneratorType, "gi_code"),
    (CoroutineType, "cr_code"),
    (AsyncGeneratorType, "ag_code"),
)
"""Types of objects, each with the attribute that holds an object's code. If a chain reaches no name, the
chain can end at an object of these types."""


class Root(NamedTuple):
    """The outermost end of a chain of owners, such as a variable.

    Attributes:
        kind: ``local`` or ``global`` (a variable), ``class``, ``cycle`` (garbage that waits for the
            collector), or ``unnamed`` (an object to which no name leads).
        name: Name of the variable or class; empty for other kinds.
        place: Name of the function or module to which the root belongs; empty if unknown.
        file: File of this function or module; empty if unknown.
    """

    kind: str
    name: str
    place: str
    file: str


class Chain(NamedTuple):
    """Chain of owners of an object. ``objects`` go from the outermost owner to the object itself."""

    root: Root
    objects: tuple[Any, ...]


class OwnerSearch:
    """Search for the owners of objects. The search keeps alive all objects that it reaches.

    ``own`` has memlog's own containers that refer to the objects. The search does not count these containers
    as owners. ``preferred`` has the identities of the program's containers that grow. The search prefers a
    chain through one of these.
    """

    def __init__(
        self, budget: TimeBudget, own: Iterable[Any] = (), preferred: frozenset[int] = frozenset()
    ) -> None:
        self._budget = budget
        self._preferred = preferred
        self._lines = CallingLines()
        self._variables = running_variables(self._lines.is_program)
        self._modules = _module_namespaces()
        self._reached: list[Any] = []
        self._index: dict[int, int] = {}
        self._owners: list[list[int]] = []
        """Owners of each reached object, as indexes into `_reached`."""
        self._expanded: set[int] = set()
        self._ignored = {id(one) for one in (*own, self._reached, self._index)}
        self._ignored |= {known for known, name in self._modules.items() if _is_memlog_name(name)}
        self._ignored.add(id(own))
        self._truncated = False

    def chains(self, targets: Sequence[Any]) -> list[Chain | None]:
        """Return the best chain of owners for each object; ``None`` for an object without a chain.

        A chain through a growing container is preferred, then the shortest chain to a name.
        """
        self._ignored.add(id(targets))
        numbers = [self._add(one) for one in targets]
        waiting = [number for number in dict.fromkeys(numbers) if number not in self._expanded]
        for level in range(_MAX_LEVELS):
            if not waiting or self._budget.spent:
                break
            if all(self._is_settled(number, level) for number in numbers):
                break
            waiting = self._expand(waiting)
        return [self._best(number) or self._last_resort(number) for number in numbers]

    @property
    def cut_short(self) -> bool:
        """True if owners were left out, or no time is left."""
        return self._truncated or self._budget.spent

    def _is_settled(self, number: int, level: int) -> bool:
        """Return True if a chain was found that is good enough to end the search for an object's owners.

        In the first `_SETTLED` levels, only a chain through a growing container is good enough. In later
        levels, any chain is good enough.
        """
        if level >= _SETTLED:
            return self._best(number) is not None
        chain = self._through_preferred(number)
        return chain is not None and not self._is_passing(chain.root)

    def _best(self, number: int) -> Chain | None:
        return self._through_preferred(number) or self._named(number)

    def _through_preferred(self, target: int) -> Chain | None:
        """Return a chain through the nearest growing container; ``None`` if there is no such chain."""
        above: dict[int, int | None] = {target: None}
        order = [target]
        for number in order:  # the loop appends to `order`
            if id(self._reached[number]) in self._preferred:
                chain = self._named(number)
                if chain is None:
                    continue
                below = self._chain(chain.root._replace(kind="local"), number, above).objects
                return Chain(chain.root, (*chain.objects, *below[1:]))
            for owner in self._owners[number]:
                root = self._root(owner)
                if owner not in above and (root is None or self._is_passing(root)):
                    above[owner] = number
                    order.append(owner)
        return None

    def _add(self, one: Any) -> int:
        number = self._index.get(id(one))
        if number is None:
            number = self._index[id(one)] = len(self._reached)
            self._reached.append(one)
            self._owners.append([])
        return number

    def _expand(self, numbers: list[int]) -> list[int]:
        """Find the referrers of one level's objects. Return the numbers of the next level's objects.

        The next level consists of the referrers that were not reached before and are not the end of a chain.
        """
        self._truncated |= len(numbers) > _MAX_FRONTIER
        numbers = numbers[:_MAX_FRONTIER]
        self._expanded.update(numbers)
        wanted = {id(self._reached[number]): number for number in numbers}
        level = tuple(self._reached[number] for number in numbers)
        referrers = gc.get_referrers(*level)
        self._ignored |= {id(level), id(referrers), id(wanted)}
        self._truncated |= len(referrers) > _MAX_REFERRERS
        new = []
        for referrer in referrers[:_MAX_REFERRERS]:
            if id(referrer) in self._ignored or _is_looking(referrer):
                continue
            known = id(referrer) in self._index
            owner = self._add(referrer)
            # A single fast pass over the referrer's elements, because it can be a list of millions.
            for child in {
                wanted[key] for key in map(id, gc.get_referents(referrer)) if key in wanted
            }:
                self._owners[child].append(owner)
            if not known:
                new.append(owner)
        self._ignored -= {id(level), id(referrers), id(wanted)}
        roots = ((number, self._root(number)) for number in new)
        return [number for number, root in roots if root is None or self._is_passing(root)]

    def _named(self, target: int) -> Chain | None:
        """Return the shortest chain from an object to a name. Use only the objects in `_reached`."""
        above: dict[int, int | None] = {target: None}
        level = [target]
        best: tuple[int, Root] | None = None
        while level and (best is None or self._is_passing(best[1])):
            for number in level:
                root = self._root(number)
                if root is not None and (best is None or self._rank(root) < self._rank(best[1])):
                    best = number, root
            below, level = level, []
            for number in below:
                for owner in self._owners[number]:
                    if owner not in above:
                        above[owner] = number
                        level.append(owner)
        return None if best is None else self._chain(best[1], best[0], above)

    def _chain(self, root: Root, top: int, above: dict[int, int | None]) -> Chain:
        objects = []
        number: int | None = top
        while number is not None:
            objects.append(self._reached[number])
            number = above[number]
        if root.kind == "global":
            namespace, *objects = objects
            name = key_of(namespace, objects[0]) if objects else None
            root = root._replace(name=name or "")
        return Chain(root, tuple(objects))

    def _root(self, number: int) -> Root | None:
        """Return the root of a chain that ends at an object; ``None`` if no chain can end at the object.

        A chain can end at the value of a variable, at a module's namespace, or at a class.
        """
        one = self._reached[number]
        if type(one) is dict:
            root = self._global(one)
            if root is not None:
                return root
        variable = self._variables.get(id(one))
        if variable is not None:
            code = variable.code
            return Root("local", variable.name, code.co_name, code.co_filename)
        if is_kind(one, type):
            return _class_root(one)
        return None

    def _global(self, namespace: dict[Any, Any]) -> Root | None:
        module = self._modules.get(id(namespace))
        if module is None:
            if "__builtins__" not in namespace or type(namespace.get("__name__")) is not str:
                return None
            module = namespace["__name__"]
        file = namespace.get("__file__")
        return Root("global", "", module, file if type(file) is str else "")

    def _is_passing(self, root: Root) -> bool:
        """Return True if a root is a local variable of a function outside the program, such as a library's.

        The search goes on from such a root, because a root in the program is preferred.
        """
        return root.kind == "local" and not self._lines.is_program(root.file)

    def _rank(self, root: Root) -> tuple[bool, bool]:
        """Return the sort key of a root. Among equally distant roots, the smallest key is preferred."""
        return not self._lines.is_program(root.file), root.kind == "class"

    def _last_resort(self, target: int) -> Chain | None:
        """Return a chain of owners for an object to which no name in the program leads.

        The chain's root can be a function, a generator, garbage, or the outermost known owner. The result is
        ``None`` if the search was cut short, or if the object has no known owner.
        """
        above: dict[int, int | None] = {target: None}
        order = [target]
        for number in order:  # the loop appends to `order`
            for owner in self._owners[number]:
                if owner not in above:
                    above[owner] = number
                    order.append(owner)
        if self.cut_short or any(one not in self._expanded for one in order):
            return None
        if all(self._owners[number] for number in order):
            return self._chain(Root("cycle", "", "", ""), order[-1], above)
        for number in order:
            one = self._reached[number]
            for kind, attribute in _LAST_RESORTS:
                if type(one) is kind:
                    code = getattr(one, attribute)
                    root = Root("unnamed", "", code.co_name, code.co_filename)
                    return self._chain(root, number, above)
        top = next(number for number in reversed(order) if not self._owners[number])
        return self._chain(Root("unnamed", "", "", ""), top, above) if top != target else None


def _class_root(one: Any) -> Root:
    module = class_namespace(one).get("__module__")
    name = type.__dict__["__qualname__"].__get__(one)
    return Root("class", name, module if type(module) is str else "", module_file(module))


def _is_looking(referrer: Any) -> bool:
    """Return True if a referrer belongs to memlog: memlog's own frame, function or object."""
    if type(referrer) is FrameType:
        return is_memlog(referrer.f_code)
    if type(referrer) is FunctionType:
        return is_memlog(referrer.__code__)
    module = type.__dict__["__module__"].__get__(type(referrer))
    return type(module) is str and _is_memlog_name(module)


def _is_memlog_name(module: str) -> bool:
    return module == "memlog" or module.startswith("memlog.")


def _module_namespaces() -> dict[int, str]:
    found = {}
    for name, module in tuple(sys.modules.items()):
        if is_kind(module, ModuleType):
            namespace = instance_dict(module)
            if namespace is not None:
                found[id(namespace)] = str(name)
    return found
