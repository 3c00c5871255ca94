"""Chains of owners, from an object up to a name in the program, and paths of names down to an object.

Each call of ``gc.get_referrers`` looks at all tracked objects. This takes 50 ms for a million objects. So a
single call finds the referrers of a whole level. The first level has the objects whose owners are unknown.
The next level has their owners, and so on.

A path is kept from step to step instead of the object, so that nothing of the program is kept alive. It is
followed again when the object is needed.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, TypeAlias

from memlog._internal.inert_access import (
    LIVE_LOCALS,
    bases,
    class_namespace,
    container_base,
    instance_dict,
    is_kind,
    key_of,
    local_variables,
    module_file,
    module_namespace,
    tracked_objects,
)
from memlog.leaks.process_objects import TimeBudget, is_memlog, is_memlog_module, running_variables
from memlog.tracer.module_stack import CallingLines

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
        self._ignored = {id(container) for container in (*own, self._reached, self._index)}
        self._ignored |= {known for known, name in self._modules.items() if is_memlog_module(name)}
        self._ignored.add(id(own))
        self._truncated = False

    def chains(self, targets: Sequence[Any]) -> list[Chain | None]:
        """Return the best chain of owners for each object; ``None`` for an object without a chain.

        A chain through a growing container is preferred, then the shortest chain to a name.
        """
        self._ignored.add(id(targets))
        numbers = [self._add(target) for target in targets]
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
                # A chain ends at the first root in the program.
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
        # These three are freed soon. Other objects can then get their identities.
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
        value = self._reached[number]
        if type(value) is dict:
            root = self._global(value)
            if root is not None:
                return root
        variable = self._variables.get(id(value))
        if variable is not None:
            code = variable.code
            return Root("local", variable.name, code.co_name, code.co_filename)
        if is_kind(value, type):
            return _class_root(value)
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
        # An object whose owners were not looked for can have a name.
        if self.cut_short or any(number not in self._expanded for number in order):
            return None
        # Each object has an owner, and none has a name: only a reference cycle keeps them alive.
        if all(self._owners[number] for number in order):
            return self._chain(Root("cycle", "", "", ""), order[-1], above)
        for number in order:
            value = self._reached[number]
            for kind, attribute in _LAST_RESORTS:
                if type(value) is kind:
                    code = getattr(value, attribute)
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
    return is_memlog_module(type.__dict__["__module__"].__get__(type(referrer)))


def _module_namespaces() -> dict[int, str]:
    namespaces = {}
    for name, module in tuple(sys.modules.items()):
        if is_kind(module, ModuleType):
            namespace = instance_dict(module)
            if namespace is not None:
                namespaces[id(namespace)] = str(name)
    return namespaces


_KEYS: Final = (str, int, float, bool, bytes, type(None))
_MAX_NAMES: Final = 100_000
"""Maximum number of names of one object. In an object with more, its elements get no path."""
_AHEAD: Final = 2
"""An instance's dictionary can lie between the instance and the value of an attribute."""

Hop: TypeAlias = tuple[str, Any]
"""Kind of a name (``item``, ``attr``, ``cell``, ``default``, ``local`` or ``ref``), and the name."""


class Start(NamedTuple):
    """Variable at which a path starts. ``code`` is ``None`` for a variable of the module ``place``.

    Otherwise it is the name, file and first line of the function that has the variable.
    """

    name: str
    place: str
    code: tuple[str, str, int] | None = None


class NamePath(NamedTuple):
    """Way from a variable to an object."""

    start: Start
    hops: tuple[Hop, ...]


def running_frames() -> list[FrameType]:
    """Return the frames of running functions of all threads, this thread's first, the outermost first.

    memlog's frames are left out: a frame that refers to itself through this list would keep objects alive.
    Before Python 3.13 (`LIVE_LOCALS` is false), other threads are left out if one of them may be traced (see
    `memlog._internal.inert_access`).
    """
    frames = _stack(sys._getframe(1))
    if LIVE_LOCALS or (sys.gettrace() is None and threading.gettrace() is None):
        current = threading.get_ident()
        # A variable that refers to this function's own frame would keep the caller's objects alive.
        threads = [frame for key, frame in sys._current_frames().items() if key != current]
        for others in map(_stack, threads):
            if LIVE_LOCALS or all(frame.f_trace is None for frame in others):
                frames += others
    return frames


_suspended: dict[tuple[str, str, int], weakref.ref[GeneratorType[Any, Any, Any]]] = {}
"""Generators that `find_suspended` has found, by `identity_of` their code."""


def find_suspended(is_program: Callable[[str], bool]) -> None:
    """Look for suspended generators of the program, so that `variables_of` knows their variables.

    Often no variable refers to a generator: ``for batch in batches()`` keeps it out of Python's sight. Of
    several generators with the same code, the one that was found first counts. ``is_program`` returns whether
    a source file is the program's. This looks at all objects: 15 to 60 ms.
    """
    for generator in tracked_objects(
        lambda types: map(operator.is_, types, itertools.repeat(GeneratorType))
    ):
        code = identity_of(generator.gi_code)
        if code not in suspended() and is_program(code[1]) and not is_memlog(generator.gi_code):
            _suspended[code] = weakref.ref(generator)


def suspended() -> list[tuple[str, str, int]]:
    """Return `identity_of` the code of each living generator that `find_suspended` has found."""
    # A list first, because a dictionary can't change while it is iterated.
    for code in [code for code, known in _suspended.items() if known() is None]:
        del _suspended[code]
    return list(_suspended)


def variables_of(code: tuple[str, str, int]) -> dict[str, Any]:
    """Return the variables of a running function, or else of a suspended generator; empty: there is none.

    ``code`` is `identity_of` the function's code.
    """
    for frame in running_frames():
        if identity_of(frame.f_code) == code:
            return local_variables(frame)
    generator = _suspended.get(code, lambda: None)()
    return {} if generator is None else _variables_of_generator(generator)


def _variables_of_generator(one: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    frame = one.gi_frame
    return {} if frame is None or one.gi_running else local_variables(frame)


def identity_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_name, code.co_filename, code.co_firstlineno


def path_to(start: Start, chain: list[Any]) -> NamePath | None:
    """Return the path through a chain of objects, from a variable's value on; ``None``: a name is missing."""
    hops: list[Hop] = []
    at, last = 0, len(chain) - 1
    while at < last:
        near = {id(chain[ahead]): ahead for ahead in range(at + 1, min(at + _AHEAD, last) + 1)}
        candidates = [
            (kind == "ref", -near[id(value)], (kind, key))
            for kind, key, value in itertools.islice(_names(chain[at]), _MAX_NAMES)
            if id(value) in near
        ]
        if not candidates:
            return None
        # A name before a mere reference, then the longest hop. Keys of unlike types can't be compared.
        _, ahead, hop = min(candidates, key=lambda candidate: candidate[:2])
        at = -ahead
        hops.append(hop)
    return NamePath(start, tuple(hops))


def follow(path: NamePath) -> Chain | None:
    """Return the chain of objects to which a path leads now; ``None`` if it leads nowhere."""
    start = path.start
    variables, root = _variables(start)
    if start.name not in variables:
        return None
    objects = [variables[start.name]]
    for hop in path.hops:
        step = _step(objects[-1], hop)
        if step is None:
            return None
        objects += step
    return Chain(root, tuple(objects))


def _variables(start: Start) -> tuple[dict[str, Any], Root]:
    if start.code is None:
        namespace = module_namespace(start.place)
        file = namespace.get("__file__")
        file = file if type(file) is str else ""
        return namespace, Root("global", start.name, start.place, file)
    return variables_of(start.code), Root("local", start.name, start.code[0], start.code[1])


def _step(owner: Any, hop: Hop) -> list[Any] | None:
    """Return the objects between ``owner`` and the object that a name leads to, and this object."""
    kind, key = hop
    base = container_base(owner)
    if kind == "item" and base is dict and type(key) is str:
        # A look-up is faster than a look at all names.
        return [dict.__getitem__(owner, key)] if dict.__contains__(owner, key) else None
    if kind == "attr":
        return _attribute(owner, key)
    value = next(
        (referent for named, name, referent in _names(owner) if (named, name) == hop), _MISSING
    )
    if value is _MISSING:
        return None
    if kind in ("cell", "default"):
        return [*_between(owner, hop), value]
    return [value]


def _between(function: FunctionType, hop: Hop) -> list[Any]:
    """Return the objects between a function and a value of its closure or its default arguments."""
    kind, key = hop
    if kind == "default":
        return [function.__defaults__]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return [cell for name, cell in cells if name == key]


def _attribute(owner: Any, key: str) -> list[Any] | None:
    if is_kind(owner, type):
        # The chain has the dictionary of a class. `vars()` returns only a proxy of it.
        namespace = next(
            (referent for referent in gc.get_referents(owner) if type(referent) is dict), {}
        )
        return [namespace, namespace[key]] if key in namespace else None
    attributes = instance_dict(owner)
    if attributes is not None and key in attributes:
        return [attributes, attributes[key]]
    return next(([value] for name, value in _slots(owner) if name == key), None)


_MISSING: Final = object()


def _names(one: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the objects to which an object refers, each with the kind of its name and the name."""
    base = container_base(one)
    if base is dict:
        # A copy: the dictionary can change while the names are read.
        pairs = list(dict.items(one))
        yield from (("item", key, value) for key, value in pairs if _is_key(key))
    elif base is list or base is deque:
        yield from (("item", number, value) for number, value in enumerate(base.__iter__(one)))
    elif is_kind(one, tuple):
        yield from (("item", number, value) for number, value in enumerate(tuple.__iter__(one)))
    elif type(one) is FunctionType:
        yield from _of_function(one)
    elif type(one) is GeneratorType:
        yield from (("local", *variable) for variable in _variables_of_generator(one).items())
    if is_kind(one, type):
        yield from (("attr", *attribute) for attribute in list(class_namespace(one).items()))
    else:
        yield from (("attr", *attribute) for attribute in list((instance_dict(one) or {}).items()))
        yield from (("attr", *attribute) for attribute in _slots(one))
    yield from (("ref", *referent) for referent in enumerate(gc.get_referents(one)))


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        # `cell_contents` raises a `ValueError` for an empty cell.
        for value in gc.get_referents(cell):
            yield "cell", name, value
    yield from (("default", *default) for default in enumerate(function.__defaults__ or ()))


def _slots(one: Any) -> Iterator[tuple[str, Any]]:
    for base in bases(type(one)):
        for name, member in class_namespace(base).items():
            if type(member) is MemberDescriptorType and type(name) is str:
                try:
                    yield name, member.__get__(one)
                except AttributeError:  # an empty slot
                    continue


def _is_key(key: Any) -> bool:
    """Return True if a key may be kept: it refers to nothing of the program."""
    if type(key) is tuple:
        return all(type(part) in _KEYS for part in key)
    return type(key) in _KEYS


def _stack(innermost: FrameType) -> list[FrameType]:
    """Return a thread's frames without memlog's, the outermost first."""
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        if not is_memlog(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
