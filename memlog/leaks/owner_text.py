"""Descriptions of owners as a program would write them, such as ``trainer.metric.preds``."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any, Final, NamedTuple

import torch

from memlog._internal.inert_access import (
    attribute_name,
    class_namespace,
    container_base,
    instance_dict,
    is_kind,
    key_of,
    local_variables,
    module_file,
    type_name,
)
from memlog.leaks.owner_chain import Chain, Root
from memlog.torchside.tensors import TensorBase
from memlog.tracer.module_stack import CallingLines

_REGISTRIES: Final = ("_modules", "_parameters", "_buffers")
"""Dictionaries of a module. A program reads their values as attributes of the module."""
_CACHE: Final = type(functools.lru_cache(int))
HOOKS: Final = "hooks"
"""Part of the names of the dictionaries in which modules and tensors have their hooks."""
_HOOKS_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that are no entries of its dictionary."""
PYPLOT_FIGURES: Final = "matplotlib._pylab_helpers"
"""Module that keeps each figure that pyplot has made, until the program closes the figure."""
_LONG: Final = 30
"""Characters. A longer expression with private attributes is told from the last object on."""
_UNSAID: Final = (tuple, CellType, MethodType, TracebackType, functools.partial)


class Owner(NamedTuple):
    """Description of the chain of objects that leads from the outermost owner to one object.

    Attributes:
        expression: The variable, attribute or element, such as ``trainer.metric.preds``; empty if unknown.
        name: Last name in ``expression``, such as ``preds``.
        container: The outermost container that grows. If no container grows, the outermost container.
            ``None`` if the chain has no container.
        contents: Expression from the container to the object, such as ``['loss']``.
        between: Objects from the container to the object.
        above: Objects from the outermost owner to the container.
        containers: All containers of the chain, without dictionaries of attributes.
        root: The outermost end of the chain.
    """

    expression: str
    name: str
    container: Any
    contents: str
    between: tuple[Any, ...]
    above: tuple[Any, ...]
    containers: tuple[Any, ...]
    root: Root

    @property
    def kind(self) -> str:
        """Name of the container's type, with an article; empty if there is no container."""
        if self.container is None:
            return ""
        inside = self.queue or self.cycle
        name = type_name(self.container if inside is None else inside)
        return f"an {name}" if name[:1] in "aeiouAEIO" else f"a {name}"

    @property
    def queue(self) -> Any:
        """The ``queue.Queue`` whose elements the container has; ``None`` if there is none."""
        queues = (value for value in self.above[-2:] if is_queue(value))
        return next(queues, None) if type(self.container) is deque else None

    @property
    def cycle(self) -> Any:
        """The ``itertools.cycle`` whose elements the container has; ``None`` if there is none."""
        return next((value for value in self.above[-1:] if type(value) is itertools.cycle), None)

    @property
    def cached_function(self) -> Any:
        """Function whose results a cache of ``functools`` keeps; ``None`` if the chain has no such cache."""
        function = (instance_dict(self._cache) or {}).get("__wrapped__")
        return function if type(function) is FunctionType else None

    @property
    def cache_room(self) -> int | None:
        """Number of results that this cache can still gain; ``None`` if there is none, or it has no limit."""
        if self._cache is None:
            return None
        _, _, most, now = _CACHE.cache_info(self._cache)
        return None if most is None else most - now

    @property
    def _cache(self) -> Any:
        return next(
            (value for value in (*self.above, *self.between) if type(value) is _CACHE), None
        )

    @property
    def place(self) -> str:
        """Function or module of the root variable, preceded by the word "in"; empty if unknown."""
        root = self.root
        if root.kind == "local":
            return f"in `{root.place}()`" if not root.place.startswith("<") else ""
        return f"in `{root.place}`" if root.kind in ("global", "class") and root.place else ""


def describe(chain: Chain, growing: frozenset[int]) -> Owner:
    """Return the description of an object's owner. ``growing`` has the identities of containers that grow."""
    objects = chain.objects
    attributes = _attribute_dicts(objects)
    expressions = _expressions(chain, attributes)
    containers = [
        number
        # The last object is the one that is described, and no owner, unless it is the only one.
        for number, value in enumerate(objects[:-1] if len(objects) > 1 else objects)
        if container_base(value) is not None and id(value) not in attributes
    ]
    grown = [number for number in containers if id(objects[number]) in growing]
    chosen = grown or containers
    at = chosen[0] if chosen else None
    expression = _without_repetition(expressions) if at is None else expressions[at]
    whole = expressions[-1]
    if at is not None and len(expression) > _LONG:
        shorter = _from_last_object(expressions[: at + 1], objects)
        whole = shorter + whole[len(expression) :] if whole.startswith(expression) else ""
        expression = shorter
    caches = _cache_dicts(objects)
    container = None if at is None else objects[at]
    if container is None:
        container = next((cache for cache in caches if id(cache) in growing), None)
    return Owner(
        expression,
        _last_name(expression),
        container,
        whole[len(expression) :] if whole.startswith(expression) else "",
        objects[(at or 0) + 1 :],
        objects[:at] if at is not None else objects[:-1][:1],
        (*(objects[number] for number in containers), *caches),
        chain.root,
    )


def describe_container(chain: Chain) -> Owner:
    """Return the description of the owner of what the container at the end of a chain gains."""
    # For `describe`, the last object is an element of the container.
    longer = chain._replace(objects=(*chain.objects, None))
    return describe(longer, frozenset((id(chain.objects[-1]),)))


def _cache_dicts(objects: tuple[Any, ...]) -> list[Any]:
    """Return the dictionaries in which caches of ``functools`` keep their results."""
    caches = [value for value in objects if type(value) is _CACHE]
    return [
        referent
        for cache in caches
        # No attribute of a cache leads to its results.
        for referent in gc.get_referents(cache)
        if type(referent) is dict and referent is not instance_dict(cache)
    ]


def _attribute_dicts(objects: tuple[Any, ...]) -> set[int]:
    """Return the identities of dictionaries that hold the attributes of an object or a class."""
    identities: set[int] = set()
    for before, owner, child in zip((None, *objects), objects, objects[1:], strict=False):
        if type(child) is not dict:
            continue
        is_registry = id(owner) in identities and key_of(owner, child) in _REGISTRIES
        of_thread = is_kind(owner, threading.local) or is_kind(before, threading.local)
        if is_kind(owner, type) or instance_dict(owner) is child or is_registry or of_thread:
            identities.add(id(child))
    return identities


def _expressions(chain: Chain, attributes: set[int]) -> list[str]:
    """Return the expression with which a program would refer to each object of a chain."""
    text = _root_text(chain)
    texts = [text]
    objects = chain.objects
    for number, (owner, child) in enumerate(itertools.pairwise(objects)):
        if type(child) is deque and any(map(is_queue, objects[max(0, number - 1) : number + 1])):
            texts.append(text)  # a program reads it by the methods of the queue
            continue
        # Backwards: cells and default arguments belong to the nearest function above them.
        function = next(
            (value for value in objects[number::-1] if type(value) is FunctionType), None
        )
        text = _of_function(function, owner, child) or _step(text, owner, child, attributes)
        texts.append(text)
    return texts


def is_queue(one: Any) -> bool:
    """Return True for a ``queue.Queue``, which has its elements in a deque."""
    kind = getattr(sys.modules.get("queue"), "Queue", None)
    return kind is not None and is_kind(one, kind)


def _without_repetition(texts: list[str]) -> str:
    """Return the last text. If the text has an attribute name twice, return only the part before this name.

    For ``node.next.next.value``, the result is ``node``.
    """
    parts = texts[-1].split(".")
    for number, part in enumerate(parts[1:], 1):
        if part in parts[number + 1 :]:
            return ".".join(parts[:number])
    return texts[-1]


def _from_last_object(texts: list[str], objects: tuple[Any, ...]) -> str:
    """Return the last text. If it passes private attributes, begin with the type of an object behind them.

    For ``trainer._connector._selector.model.kept``, the result is ``kept of Net`` if the model is a ``Net``.
    """
    last = texts[-1]
    # Backwards, for the shortest text.
    for number in range(len(texts) - 2, 0, -1):
        rest = last[len(texts[number]) :]
        is_private = "._" in texts[number] and "._" not in rest
        if is_private and rest.startswith(".") and instance_dict(objects[number]) is not None:
            return f"{rest[1:]} of {type_name(objects[number])}"
    return last


def _root_text(chain: Chain) -> str:
    root = chain.root
    if root.name:
        return root.name
    first = chain.objects[0] if chain.objects else None
    return _function_text(first) if root.kind == "unnamed" else type_name(first)


def _function_text(one: Any) -> str:
    if type(one) is FunctionType:
        return f"{one.__name__}()"
    name = type_name(one)
    return f"{name} {one.__name__}()" if name in ("generator", "coroutine") else name


def _step(text: str, owner: Any, child: Any, attributes: set[int]) -> str:
    """Return the expression for ``child``. ``text`` is the expression for ``owner``.

    ``attributes`` contains the identities of dictionaries that hold attributes.
    """
    if id(child) in attributes:
        return text
    if id(owner) in attributes:
        key = key_of(owner, child)
        return f"{text}.{key}" if key else text
    if container_base(owner) is not None:
        key = key_of(owner, child) if container_base(owner) is dict else None
        return f"{text}['{key}']" if key else f"{text}[…]"
    if any(is_kind(owner, kind) for kind in _UNSAID):
        return text
    return _of_object(text, owner, child)


def _of_object(text: str, owner: Any, child: Any) -> str:
    if type(owner) is FrameType:
        local = next((key for key, value in local_variables(owner).items() if value is child), "…")
        return f"{text} → `{local}` of {owner.f_code.co_name}()"
    if type(owner) is GeneratorType and owner.gi_frame is not None:
        name = next(
            (key for key, value in local_variables(owner.gi_frame).items() if value is child), ""
        )
        return f"{name} of {text}" if name else text
    if is_kind(owner, BaseException) and type(child) is TracebackType:
        return f"{text}.__traceback__"
    if type(owner) is _CACHE:
        return f"cache of {text}()"
    attribute = attribute_name(owner, child) or _hooks_of_tensor(owner, child)
    return f"{text}.{attribute}" if attribute else text


def _hooks_of_tensor(owner: Any, child: Any) -> str:
    """Return the name of a tensor's dictionary of hooks if ``child`` is one; otherwise an empty string."""
    if not is_kind(owner, torch.Tensor):
        return ""
    return next(
        (name for name in _HOOKS_OF_TENSORS if getattr(TensorBase, name).__get__(owner) is child),
        "",
    )


def _of_function(function: FunctionType | None, owner: Any, child: Any) -> str:
    """Return the expression of an object that a function's closure or default arguments hold.

    Return an empty string if neither holds the object.
    """
    if function is None:
        return ""
    code = function.__code__
    if type(owner) is CellType:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        names = [name for name, cell in cells if cell is owner]
        return f"{names[0]} of {function.__name__}()" if names else ""
    if type(owner) is tuple and function.__defaults__ is owner:
        # Default values belong to the last arguments.
        arguments = code.co_varnames[: code.co_argcount][-len(owner) :]
        names = [name for name, default in zip(arguments, owner, strict=False) if default is child]
        return f"{names[0]} of {function.__name__}()" if names else ""
    if type(owner) is dict and function.__kwdefaults__ is owner:
        return f"{key_of(owner, child)} of {function.__name__}()"
    return ""


def _last_name(expression: str) -> str:
    name = expression.rpartition(" → ")[2].partition(" of ")[0]
    while name.endswith("]"):
        name = name[: name.rfind("[")]
    name = name.rpartition(".")[2]
    return name if name.isidentifier() else ""


def program_files(owner: Owner) -> list[str]:
    """Return source files of the program, the likeliest first.

    These files define the classes of the objects in ``owner.above``, the function or module of
    ``owner.root``, and the functions that are running now.
    """
    lines = CallingLines()
    # The objects nearest to the container first: their classes are the likeliest to add to it.
    modules = (class_namespace(type(value)).get("__module__") for value in reversed(owner.above))
    files = [*map(module_file, modules), owner.root.file, *_running_files()]
    return [file for file in dict.fromkeys(files) if file and lines.is_program(file)]


def _running_files() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back
