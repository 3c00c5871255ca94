"""Descriptions of owners as a program would write them: ``trainer.metric.preds``."""

from __future__ import annotations

import functools
import gc
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any, Final, NamedTuple

from memlog.leaks.frame_variables import local_variables
from memlog.leaks.inert_access import (
    attribute_name,
    container_base,
    instance_dict,
    is_kind,
    key_of,
    type_name,
)
from memlog.leaks.owner_chain import Chain, Root

_REGISTRIES: Final = ("_modules", "_parameters", "_buffers")
"""Attributes in which a module keeps what its own attributes seem to be."""
_CACHE: Final = type(functools.lru_cache(int))
_UNSAID: Final = (tuple, CellType, MethodType, functools.partial)


class Owner(NamedTuple):
    """The owner of an object, for people.

    Attributes:
        expression: The variable, attribute or element, such as ``trainer.metric.preds``; empty if unknown.
        name: Last name in it: ``preds``.
        container: The container that grows; without one the last container on the way, or ``None``.
        contents: What lies between the container and the object, such as ``['loss']``.
        between: Objects from the container to the object.
        above: Objects from the outermost owner to the container.
        containers: All containers on the way, without attributes.
        root: The end of the chain.
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
        """Name of the container's type, with its article; empty without a container."""
        if self.container is None:
            return ""
        name = type_name(self.container)
        return f"an {name}" if name[:1] in "aeiouAEIO" else f"a {name}"

    @property
    def place(self) -> str:
        """Function or module whose variable it is, with its preposition; empty if unknown."""
        root = self.root
        if root.kind == "local":
            return f"in `{root.place}()`" if not root.place.startswith("<") else ""
        return f"in `{root.place}`" if root.kind in ("global", "class") and root.place else ""


def describe(chain: Chain, growing: frozenset[int]) -> Owner:
    """Return the description of a chain.

    Args:
        chain: Chain of owners.
        growing: Identities of the containers that grow.
    """
    objects = chain.objects
    expressions = _expressions(chain)
    attributes = _attribute_dicts(objects)
    containers = [
        number
        for number, one in enumerate(objects[:-1] if len(objects) > 1 else objects)
        if container_base(one) is not None and id(one) not in attributes
    ]
    caches = [one for cache in objects if type(cache) is _CACHE for one in gc.get_referents(cache)]
    caches = [one for one in caches if type(one) is dict and one is not instance_dict(cache)]
    grown = [number for number in containers if id(objects[number]) in growing]
    at = (grown or containers[:1] or [None])[0]
    expression = expressions[at if at is not None else -1]
    whole = expressions[-1]
    return Owner(
        expression,
        _last_name(expression),
        None if at is None else objects[at],
        whole[len(expression) :] if whole.startswith(expression) else "",
        objects[(at or 0) + 1 :],
        objects[: at or 0],
        (*(objects[number] for number in containers), *caches),
        chain.root,
    )


def _attribute_dicts(objects: tuple[Any, ...]) -> set[int]:
    """Return the identities of dictionaries that are an object's or a class's attributes."""
    found = set()
    for owner, child in zip(objects, objects[1:], strict=False):
        if type(child) is dict and (is_kind(owner, type) or instance_dict(owner) is child):
            found.add(id(child))
            continue
        if type(child) is dict and id(owner) in found and key_of(owner, child) in _REGISTRIES:
            found.add(id(child))
    return found


def _expressions(chain: Chain) -> list[str]:
    """Return how a program would write each object of a chain."""
    text = _root_text(chain)
    texts = [text]
    attributes = _attribute_dicts(chain.objects)
    for owner, child in zip(chain.objects, chain.objects[1:], strict=False):
        text = _step(text, owner, child, attributes)
        texts.append(text)
    return texts


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
    """Return the expression of a child, from that of its owner."""
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
    if type(owner) is FunctionType:
        return _of_function(text, owner, child)
    if type(owner) is FrameType:
        name = next((key for key, one in local_variables(owner).items() if one is child), "…")
        return f"{text} → `{name}` of {owner.f_code.co_name}()"
    if type(owner) is GeneratorType and owner.gi_frame is not None:
        name = next((key for key, one in local_variables(owner.gi_frame).items() if one is child), "")
        return f"{name} of {text}" if name else text
    if type(owner) is TracebackType:
        return text
    if is_kind(owner, BaseException) and type(child) is TracebackType:
        return f"{text}.__traceback__"
    if type(owner) is _CACHE:
        return f"cache of {text}()"
    name = attribute_name(owner, child)
    return f"{text}.{name}" if name else text


def _of_function(text: str, function: FunctionType, child: Any) -> str:
    if function.__defaults__ is child:
        return f"default argument of {function.__name__}()"
    if function.__kwdefaults__ is child:
        return f"default argument of {function.__name__}()"
    if function.__closure__ is child:
        return f"{text} → closure of {function.__name__}()"
    return text


def _last_name(expression: str) -> str:
    name = expression
    while name.endswith("]"):
        name = name[: name.rfind("[")]
    name = name.rpartition(".")[2]
    return name if name.isidentifier() else ""

