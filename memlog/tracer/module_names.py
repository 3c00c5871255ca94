"""Names and numbers of layers."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from memlog._internal.inert_access import instance_dict, instances, pass_seconds
from memlog.inputs.step_inputs import program_frames, variables_of
from memlog.trace.encoding import OUTSIDE, OUTSIDE_PATH
from memlog.trace.result import common_length, with_parents
from memlog.tracer.user_scopes import UserScope

MAX_NAMES = 10_000
"""Maximum number of layers. Memory of modules beyond the maximum counts as outside all modules."""

_COMPILED = "_orig_mod"
"""Attribute in which ``torch.compile``'s wrapper keeps the module."""


class RootModule(NamedTuple):
    """A module that no other module calls.

    ``prefix``: Prefix of the paths of the modules inside this module.
    """

    module: weakref.ref[Any]
    path: str
    prefix: str


class ModuleNames:
    """Numbers and paths of the layers in a window. A layer is a module or a scope.

    The path of a module in the model is its name in ``named_modules``. The model's own path is the name of
    its class. If a child has that name, " (model)" is appended. The path of a module that the model does not
    own, such as a second network or a loss, is the name of its class in parentheses. The path of a scope is
    its name in parentheses, after the path of the layer around it.

    If the user has named no model and several networks are trained, such as a generator and its critic, no
    network is "the model": each one's path is the name of its class in parentheses. A network is trained if
    an optimizer has one of its parameters. If the known optimizers have none of any network, a network is
    trained if one of its parameters requires a gradient.

    Args:
        model: The model that the user has named. ``None``: `outermost` finds it when a part is called.
        others: Further root modules that are known from the start.
        optimizers: Optimizers that are known from the start. Those that step are added, and those that a
            search for the outermost module finds.
        most_seconds: As in `ModuleParents`.

    Attributes:
        paths: Paths by number. The first is "outside all modules", the second the model.
        kinds: Class name of each layer's module, by the same numbers as ``paths``.
        optimizers: Class name of the optimizer of each optimizer step, in the order of the steps.
        omitted: Number of modules beyond `MAX_NAMES`.
        roots: Root modules in the order in which they were found.
    """

    def __init__(
        self,
        model: Any = None,
        others: Sequence[Any] = (),
        optimizers: Iterable[Any] = (),
        most_seconds: float | None = None,
    ) -> None:
        self.paths = [OUTSIDE_PATH]
        self.kinds = [""]
        self.optimizers: list[str] = []
        self.omitted = 0
        self.roots: list[RootModule] = []
        self._named = model is not None
        self._numbers = {OUTSIDE_PATH: OUTSIDE}
        self._around: dict[int, tuple[int, ...]] = {OUTSIDE: ()}
        # By identity: hashing a module may run the user's code. Each entry refers to its module, since Python
        # reuses the identity of a deleted module.
        self._known: dict[int, _KnownModule] = {}
        self._networks = defaultdict[str, _LiveNumbers](_LiveNumbers)
        self._parents = ModuleParents(most_seconds)
        self._optimizers = {id(optimizer): weakref.ref(optimizer) for optimizer in optimizers}
        for module in (model, *others):
            if module is not None and not self.knows(module):
                self._add_root(module)

    def layer_of(self, module: Any, surrounding: int) -> int:
        """Return the number of a module that the layer ``surrounding`` calls.

        If the module has several paths in the model, the one nearest to ``surrounding`` counts.
        """
        if type(module) is UserScope:  # isinstance() may run a property `__class__` of the module
            inside = f"{self.paths[surrounding]}." if surrounding != OUTSIDE else ""
            return self.number(f"{inside}({module.name})", "scope")
        numbers = self._numbers_of(module)
        if not numbers:
            return self._discover(module, surrounding)
        if len(numbers) == 1:
            return next(iter(numbers))
        nearest = self._known[id(module)].nearest
        number = nearest.get(surrounding)
        if number is None:
            around = self.paths[surrounding].split(".")
            number = nearest[surrounding] = max(
                numbers,
                key=lambda candidate: common_length(self.paths[candidate].split("."), around),
            )
        return number

    def knows(self, module: Any) -> bool:
        return bool(self._numbers_of(module))

    def _numbers_of(self, module: Any) -> dict[int, None]:
        entry = self._known.get(id(module))
        return entry.numbers if entry is not None and entry.module() is module else {}

    def number(self, path: str, kind: str = "") -> int:
        """Return the number of a path. Add the path if it is new.

        Beyond `MAX_NAMES`, return `OUTSIDE` for a new path.
        """
        number = self._numbers.get(path)
        if number is None:
            if len(self.paths) >= MAX_NAMES:
                self.omitted += 1
                return OUTSIDE
            number = self._numbers[path] = len(self.paths)
            self.paths.append(path)
            self.kinds.append(kind)
        return number

    def layers_around(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of a layer and of the layers that contain it; empty for `OUTSIDE`."""
        layers = self._around.get(layer)
        if layers is None:
            paths = with_parents(self.paths[layer], self.paths)
            layers = tuple(self._numbers[path] for path in paths if path in self._numbers)
            self._around[layer] = layers
        return layers

    def optimizer_steps(self, optimizer: Any) -> None:
        """Remember an optimizer: what it steps is trained."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def known_optimizers(self) -> list[Any]:
        """Return the optimizers that were given, found or seen to step, without those that are deleted."""
        known = {id(optimizer): optimizer for optimizer in _alive(self._optimizers.values())}
        return list(
            {
                **known,
                **{id(optimizer): optimizer for optimizer in self._parents.optimizers()},
            }.values()
        )

    @property
    def search_skipped(self) -> bool:
        """True if a root module is perhaps a part of another module, because a search took too long."""
        return self._parents.skipped

    def final_paths(self) -> tuple[str, ...]:
        """Return the paths by number, with the first network's name in its paths if several are trained."""
        if self._named or len(self.roots) < 2:  # noqa: PLR2004
            return tuple(self.paths)
        first = self.roots[0].path
        # The first one may be trained later: then its name does not change.
        if not _requires_grad(self.roots[0].module()) or not self._trains_another():
            return tuple(self.paths)
        name = f"({first})"

        def final(path: str) -> str:
            if path == first or path.startswith(f"{first}."):
                return name + path.removeprefix(first)
            return path if path.startswith("(") or path == OUTSIDE_PATH else f"{name}.{path}"

        return tuple(map(final, self.paths))

    def _trains_another(self) -> bool:
        """Return whether another network than the first is trained."""
        stepped = _parameters_of(self.known_optimizers())
        trained = [
            any(id(parameter) in stepped for parameter in _parameters(root.module()))
            for root in self.roots
        ]
        # An optimizer may have copies of all parameters, such as in 32 bits.
        return (
            any(trained[1:])
            if any(trained)
            else any(_requires_grad(root.module()) for root in self.roots[1:])
        )

    def owner_of(self, name: str, root: RootModule) -> int:
        """Return the number of the module that owns a parameter or buffer.

        ``name``: Name of the parameter or buffer in ``root``.
        """
        root_layer = self._numbers.get(root.path, OUTSIDE)
        path = _plain(name.rpartition(".")[0])
        return self._numbers.get(root.prefix + path, root_layer) if path else root_layer

    def _discover(self, module: Any, surrounding: int) -> int:
        if surrounding == OUTSIDE:
            named = not self.roots or _has_tensors(module)
            root = self._parents.outermost(module) if named else module
            path = self._add_root(root)
            return (
                self.number(path)
                if root is module
                else max(self._numbers_of(module), default=OUTSIDE)
            )
        path = f"{self.paths[surrounding]}.({_kind(module)})"
        self._remember(module, path)
        return self.number(path)

    def _add_root(self, root: Any) -> str:
        first = not self.roots
        path, reference = self._first_name(root) if first else self._name_of_another(root)
        prefix = "" if first else f"{path}."
        if len(self.roots) < MAX_NAMES:
            self.roots.append(RootModule(reference, path, prefix))
        # The limit is for shared modules: each comes one time for each of its paths.
        for name, module in itertools.islice(_named_modules(root), MAX_NAMES):
            # The plain name is empty for the root, and for the module inside torch.compile's wrapper. Both
            # are one layer.
            self._remember(module, prefix + _plain(name) if _plain(name) else path)
        return path

    def _first_name(self, root: Any) -> tuple[str, weakref.ref[Any]]:
        path, kind = _name_beside_children(root), _kind(root)
        if path == kind and not self._named and _has_tensors(root):
            # The name is its own if several networks are trained.
            _, reference = self._networks[kind].take(root)
            return path, reference
        return path, weakref.ref(root)

    def _name_of_another(self, root: Any) -> tuple[str, weakref.ref[Any]]:
        """Return the class name in parentheses, with a number appended if another live network has that name.

        Modules without parameters, such as losses, share a name.
        """
        kind = _kind(root)
        if _has_tensors(root):
            number, reference = self._networks[kind].take(root)
        else:
            number, reference = self._networks[kind].lowest(), weakref.ref(root)
        return (f"({kind})" if number == 1 else f"({kind} {number})"), reference

    def _remember(self, module: Any, path: str) -> None:
        number = self.number(path, _kind(module))
        numbers = self._numbers_of(module)
        if numbers:
            # The new path can be nearer to a layer than the known paths.
            self._known[id(module)].nearest.clear()
            numbers[number] = None
        elif len(self._known) <= 2 * MAX_NAMES:
            self._known[id(module)] = _KnownModule(weakref.ref(module), {number: None}, {})


class _KnownModule(NamedTuple):
    """A module of the window.

    ``numbers``: The module's numbers, one for each of its paths, as keys. ``nearest``: The number that counts
    inside a surrounding layer, for the layers inside which the module was called so far.
    """

    module: weakref.ref[Any]
    numbers: dict[int, None]
    nearest: dict[int, int]


class _LiveNumbers:
    """Numbers of the live networks of one class, counted from 1. A deleted network's number is free again."""

    def __init__(self) -> None:
        self._taken = set[int]()
        self._lowest = 1

    def lowest(self) -> int:
        """Return the lowest free number."""
        while self._lowest in self._taken:
            self._lowest += 1
        return self._lowest

    def take(self, network: Any) -> tuple[int, weakref.ref[Any]]:
        """Return the lowest free number, and a reference that frees it when ``network`` is deleted."""
        number = self.lowest()
        self._taken.add(number)

        def deleted(_reference: object) -> None:
            self._taken.discard(number)
            self._lowest = min(self._lowest, number)

        return number, weakref.ref(network, deleted)


_MOST_SEARCHES = 3


def search_seconds() -> float:
    """Return the seconds that a search among all live modules is expected to take."""
    return 2 * pass_seconds()


class ModuleParents:
    """Search for the modules that register a module, among all live modules.

    A search looks at all objects of the process, which takes 0.1 s or more. So its result
    is used again, and a program that makes new networks in every step is searched no more than
    `_MOST_SEARCHES` times.

    ``most_seconds``: Seconds that a search may be expected to take. If it is expected to take longer, the
    search looks only at `visible_instances`. ``None``: no limit.

    Attributes:
        skipped: True if no visible module registers a module, and the others were not looked at.
    """

    def __init__(self, most_seconds: float | None = None) -> None:
        self.skipped = False
        self._most_seconds = most_seconds
        self._only_visible = False
        self._searches = 0
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._parents = defaultdict[int, list[weakref.ref[Any]]](list)
        self._optimizers: list[weakref.ref[Any]] = []

    def outermost(self, module: Any, optimizers: Sequence[Any] = ()) -> Any:
        """Return the outermost live module that registers ``module``; ``module`` itself if none does.

        A program may call parts of its model and never the model's ``forward``, as agents of reinforcement
        learning and ``training_step`` of Lightning do. If several outermost modules share the part, the one
        that has most parameters of the optimizers is meant; if that is not clear, return ``module``.
        """
        known = self._modules.get(id(module))
        if (known is None or known() is not module) and self._searches < _MOST_SEARCHES:
            self._only_visible = (
                self._most_seconds is not None and search_seconds() > self._most_seconds
            )
            self._search()
        known_optimizers = list(optimizers) or self.optimizers()
        outermost = _of_the_optimizers(list(self._ends(module)), module, known_optimizers)
        self.skipped = self.skipped or (self._only_visible and outermost is module)
        return outermost

    def optimizers(self) -> list[Any]:
        """Return the optimizers that the last search found, without those that are deleted."""
        return _alive(self._optimizers)

    def _search(self) -> None:
        self._searches += 1
        self._modules.clear()
        self._parents.clear()
        self._optimizers = []
        candidates = visible_instances() if self._only_visible else instances(nn.Module, Optimizer)
        for instance in candidates:
            reference = weakref.ref(instance)
            if issubclass(type(instance), Optimizer):
                self._optimizers.append(reference)
                continue
            self._modules[id(instance)] = reference
            for name, child in registered(instance, "_modules").items():
                # A wrapper of `torch.compile` is the same layer as the module in it, not a parent.
                if name != _COMPILED and child is not None:
                    self._parents[id(child)].append(reference)

    def _ends(self, module: Any) -> Iterator[Any]:
        """Yield the modules that no other module registers, among those that ``module`` is a part of."""
        waiting, seen = [module], {id(module)}
        while waiting:
            inner = waiting.pop()
            around = _alive(self._parents.get(id(inner), ()))
            if not around:
                yield inner
            for parent in around:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)


_MOST_VALUES = 2_000
"""Maximum number of values to look at in a search of the variables."""
_MOST_ITEMS = 256
"""Containers and objects with more values than this are not looked into: they are data, not models."""
_DEPTH = 3
"""Number of times that a search looks into the values of values."""


def visible_instances() -> list[Any]:
    """Return the modules and optimizers to which variables of this thread's running functions refer.

    Those in containers and in attributes of objects count, too: a trainer has its model as ``self.model``.
    The parts of the modules are returned as well.
    """
    values: list[Any] = []
    for frame in program_frames(_outwards(sys._getframe(1))):
        values += (value for _, value in variables_of(frame))
        globals_of = frame.f_globals
        values += (globals_of[name] for name in frame.f_code.co_names if name in globals_of)
    modules: dict[int, Any] = {}
    optimizers: list[Any] = []
    seen = set[int]()
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for value in itertools.islice(values, _MOST_VALUES):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if issubclass(type(value), nn.Module):
                modules[id(value)] = value
            elif issubclass(type(value), Optimizer):
                optimizers.append(value)
            else:
                inner += _values_in(value)
        values = inner
    for root in list(modules.values()):
        if len(modules) > MAX_NAMES:
            break
        modules.update((id(part), part) for _, part in unique_modules(root))
    return [*modules.values(), *optimizers]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _values_in(value: Any) -> list[Any]:
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value) if len(value) <= _MOST_ITEMS else []
    if issubclass(kind, (type, ModuleType)):
        return []
    attributes = value if kind is dict else instance_dict(value)
    return list(attributes.values()) if attributes and len(attributes) <= _MOST_ITEMS else []


def is_whole(root: Any, optimizers: Iterable[Any]) -> bool:
    """Return whether the optimizers that step parameters of ``root`` step no others.

    Such a root is not a part of a larger model that is trained. Return False if no optimizer steps any of its
    parameters: an optimizer may have copies of them.
    """
    own = {id(parameter) for parameter in _parameters(root)}
    stepped = [
        parameters
        for each in optimizers
        if not own.isdisjoint(parameters := _parameters_of([each]))
    ]
    return bool(stepped) and all(parameters <= own for parameters in stepped)


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [alive for alive in (reference() for reference in references) if alive is not None]


def _of_the_optimizers(candidates: Sequence[Any], module: Any, optimizers: Iterable[Any]) -> Any:
    """Return the candidate with most of the optimizers' parameters; ``module`` if several have as many."""
    if len(candidates) > 1:
        trained = _parameters_of(optimizers)
        shares = [
            len(trained & {id(parameter) for parameter in _parameters(root)}) for root in candidates
        ]
        best = max(shares)
        candidates = [root for root, share in zip(candidates, shares, strict=True) if share == best]
    return candidates[0] if len(candidates) == 1 else module


def _parameters_of(optimizers: Iterable[Any]) -> set[int]:
    """Return the identities of the parameters that optimizers step."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in vars(optimizer).get("param_groups", ())
        for parameter in group["params"]
    }


def registered(module: Any, registry: str) -> dict[str, Any]:
    """Return a module's children, parameters or buffers, without running code of the module's class."""
    members = object.__getattribute__(module, "__dict__").get(registry)
    return members if issubclass(type(members), dict) else {}


def unique_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield each module once, as ``named_modules`` does."""
    seen: set[int] = set()
    for name, module in itertools.islice(_named_modules(root), MAX_NAMES):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def count_modules(roots: Iterable[Any]) -> int:
    """Return the number of modules in root modules, at most `MAX_NAMES` of each."""
    return sum(1 for root in roots for _ in unique_modules(root))


def _named_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules as ``named_modules(remove_duplicate=False)`` does."""
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        prefix = f"{name}." if name else ""
        # The last entry of the list is taken first.
        children = reversed(registered(module, "_modules").items())
        waiting += [(prefix + child, inner) for child, inner in children if inner is not None]


def _parameters(root: Any) -> Iterator[Any]:
    for _, module in () if root is None else unique_modules(root):
        yield from (
            parameter
            for parameter in registered(module, "_parameters").values()
            if parameter is not None
        )


def _has_tensors(root: Any) -> bool:
    return any(True for _ in _parameters(root))


def _requires_grad(root: Any) -> bool:
    return any(parameter.requires_grad for parameter in _parameters(root))


def _kind(module: Any) -> str:
    return type(registered(module, "_modules").get(_COMPILED, module)).__name__


def _name_beside_children(root: Any) -> str:
    """Return the name of a model's class, with " (model)" appended if a child has that name."""
    name, inside = _kind(root), root
    while _COMPILED in registered(inside, "_modules"):
        inside = registered(inside, "_modules")[_COMPILED]
    while name in registered(inside, "_modules"):
        name = f"{name} (model)"
    return name


def _plain(name: str) -> str:
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)
