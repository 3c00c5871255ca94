"""Tables of the fields of JSON documents, from the structs in memlog that make these documents."""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import griffe
import msgspec

MARK = re.compile(r"<!-- the fields of ([\w.]+) -->")
"""Mark in a page, which `filled` replaces by the table of a struct."""

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_UNIONS = (typing.Union, types.UnionType)


class Field(NamedTuple):
    """A row of a table."""

    name: str
    """Path in the document: ``<name>`` is any key of an object, ``[]`` any element of a list."""
    type: str
    meaning: str


def filled(markdown: str, package: griffe.Module) -> str:
    """Return a page with tables in place of its marks.

    Args:
        markdown: The page.
        package: The loaded package memlog.
    """
    return MARK.sub(lambda mark: _table(mark[1], package), markdown)


def _table(path: str, package: griffe.Module) -> str:
    module, _, name = path.rpartition(".")
    rows = fields(getattr(importlib.import_module(module), name), package)
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for row in rows:
        meaning = row.meaning.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.type} | {meaning} |")
    return "\n".join(lines)


def fields(
    struct: type[msgspec.Struct], package: griffe.Module, prefix: str = ""
) -> Iterator[Field]:
    """Yield the fields of a document, each followed by the fields within it."""
    hints = typing.get_type_hints(struct)
    for name in struct.__struct_fields__:
        meaning = _meaning(struct, name, package)
        is_time = re.search(r"\bIsoTime\b", _annotation(struct, name, package)) is not None
        yield from _rows(f"{prefix}{name}", hints[name], meaning, is_time, package)


def _rows(
    path: str, hint: Any, meaning: str, is_time: bool, package: griffe.Module
) -> Iterator[Field]:
    kind, is_optional = _required(hint)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    null = " or null" if is_optional else ""
    if _is_struct(kind):
        if meaning or is_optional:
            yield Field(path, f"object{null}", meaning)
        yield from fields(kind, package, f"{path}.")
    elif origin in (dict, Mapping) or (
        origin in (list, tuple, Sequence) and _is_struct(arguments[0])
    ):
        inner = arguments[-1] if origin in (dict, Mapping) else arguments[0]
        within = f"{path}.<name>" if origin in (dict, Mapping) else f"{path}[]"
        if _is_struct(inner):
            if meaning:
                yield Field(path, "object" if within.endswith(">") else "list", meaning)
            yield from fields(inner, package, f"{within}.")
        else:
            yield from _rows(within, inner, meaning, is_time, package)
    else:
        name, values = _leaf(kind)
        choice = f"One of {', '.join(f'`{value}`' for value in values)}." if values else ""
        yield Field(path, f"{'time' if is_time else name}{null}", f"{meaning} {choice}".strip())


def _required(hint: Any) -> tuple[Any, bool]:
    """Return a type without its ``None``, and True if it had one."""
    if typing.get_origin(hint) not in _UNIONS:
        return hint, False
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    is_optional = len(others) < len(typing.get_args(hint))
    return (others[0] if len(others) == 1 else typing.Union[tuple(others)]), is_optional  # noqa: UP007 - computed


def _leaf(kind: Any) -> tuple[str, tuple[str, ...]]:
    """Return the name of a type without fields, and its values if only some are possible."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple, Sequence):
        element, is_optional = _required(arguments[0])
        return f"list of {_leaf(element)[0]}s{' or nulls' if is_optional else ''}", ()
    if origin is typing.Literal:
        return "string", arguments
    if origin in _UNIONS:  # of literals
        return "string", tuple(value for one in arguments for value in _leaf(one)[1])
    return _TYPES[kind], ()


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _meaning(struct: type, name: str, package: griffe.Module) -> str:
    """Return the docstring of a field, or its entry in the docstring of its class, with JSON's ``null``."""
    found, member = _member(struct, name, package)
    text = member.docstring.value if member.docstring is not None else ""
    if not text and found.docstring is not None:
        for section in found.docstring.parse("google"):
            if section.kind.value == "attributes":
                text = next((one.description for one in section.value if one.name == name), "")
    return " ".join(text.replace("``None``", "null").split())


def _annotation(struct: type, name: str, package: griffe.Module) -> str:
    return str(_member(struct, name, package)[1].annotation)


def _member(
    struct: type, name: str, package: griffe.Module
) -> tuple[griffe.Class, griffe.Attribute]:
    """Return the class that declares a field, and the field, as griffe reads them."""
    declaring = next(one for one in struct.__mro__ if name in inspect.get_annotations(one))
    found = package[f"{declaring.__module__.partition('.')[2]}.{declaring.__name__}"]
    assert isinstance(found, griffe.Class)  # noqa: S101 - for the type
    member = found[name]
    assert isinstance(member, griffe.Attribute)  # noqa: S101 - for the type
    return found, member
