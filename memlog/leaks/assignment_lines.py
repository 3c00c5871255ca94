"""Statements of the program that add to a variable or an attribute, such as ``losses.append(loss)``."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from memlog._internal.terminal import source_name

_MAX_CHARACTERS: Final = 400_000
"""If a source file has more characters than this, it is not parsed. Parsing this size takes about 100 ms."""
_ADDING: Final = frozenset(
    (
        "append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put", "put_nowait",
        "push", "write", "record", "log",
    )
)  # fmt: skip
_REGISTERS: Final = re.compile("register_.*hook")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_REPEATS: Final = (ast.For, ast.While, *_FUNCTIONS)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REPEATED: Final = ("body", "elt", "key", "value")
"""Fields of a loop's node that are evaluated again and again."""
_CALLED: Final = re.compile("on_")
"""Beginning of the names of methods that Lightning's and transformers' trainers call."""
_ADDS_TO_FIRST: Final = ("heappush", "insort", "insort_left", "insort_right")
"""Functions of `heapq` and `bisect` that add to their first argument. `_TAKES_FROM_FIRST` remove."""
_TAKES_FROM_FIRST: Final = ("heappop", "heappushpop", "heapreplace")
_REMOVING: Final = frozenset(("pop", "popleft", "popitem", "clear", "remove", "discard"))
_LESS, _MORE = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
_JOINS: Final = re.compile("cat|stack|append|pad|chain")
"""Pattern in the names of functions that join tensors, arrays or lists."""
_ADDS_GROUP: Final = re.compile("add_param_group")


class Addition(NamedTuple):
    """A statement that adds to a variable or an attribute.

    ``value`` is the source text of the added value, if the value is a name or an attribute; otherwise empty.
    ``classes`` and ``functions`` have the names of those around the statement, the outermost first.
    """

    line: int
    value: str
    classes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


@functools.lru_cache(256)
def additions(file: str, name: str) -> tuple[Addition, ...]:
    """Return the statements of a file that add to the variable or attribute ``name``.

    A search asks for the same name several times, and to parse a file takes most of its time.
    """
    nodes = _nodes(file, name)
    statements = {statement for node in nodes for statement in _addition(node, name)}
    if not statements:
        return ()
    # `ast.walk` gives the outer ones first.
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    return tuple(
        Addition(
            statement.line,
            statement.value,
            tuple(outer.name for outer in classes if _covers(outer, statement.line)),
            tuple(outer.name for outer in functions if _covers(outer, statement.line)),
        )
        for statement in sorted(statements)
    )


def adds_to_itself(file: str, name: str) -> bool:
    """Return True if a file replaces ``name`` by a longer value, as in ``x = torch.cat([x, new])``.

    If the statement cuts the value, or its loop or function begins with another value, the result is False.
    """
    return any(_keeps(file, name, in_place=False))


def is_made_anew(file: str, name: str) -> bool:
    """Return True if each statement that adds to ``name`` is in a loop or a function that makes it anew."""
    kept = _keeps(file, name, in_place=True)
    return bool(kept) and not any(kept)


@functools.lru_cache(256)
def limiting_line(file: str, name: str, line: int) -> int | None:
    """Return the line that limits the length of ``name``, such as ``if len(name) < 1000:``.

    ``line`` is that of a statement that adds to it. In the function around this statement, a limit is a
    comparison of the length that decides whether to add, something that removes elements, or a statement that
    makes ``name`` anew, if it is in a loop around the statement, or the function is called in a loop. Of the
    other methods of a class, those count that the file calls in a loop, such as ``end_epoch``, or that are
    named ``on_…``, which a trainer calls. ``None``: there is none. Whether it works is unknown.
    """
    nodes = _nodes(file, name)
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS) and _covers(node, line)]
    inside = list(ast.walk(functions[-1])) if functions else nodes  # the innermost is the last
    again = nodes if functions and _is_called_in_a_loop(functions[-1], nodes) else []
    loops = [node for node in inside if isinstance(node, _LOOPS) and _covers(node, line)]
    around = {id(inner) for loop in loops for inner in ast.walk(loop)} | set(map(id, again))
    added = {statement.line for node in inside for statement in _addition(node, name)}
    for node in inside:
        is_limit = _removes(node, name) or (id(node) in around and _begins_anew(node, name))
        if isinstance(node, ast.If):
            is_limit = is_limit or _limits(node, name, added)
        if is_limit:
            return getattr(node, "lineno", None)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and _covers(node, line)]
    methods = (
        node for owner in classes[-1:] for node in owner.body if isinstance(node, _FUNCTIONS)
    )
    called = (
        node
        for method in methods
        if _CALLED.match(method.name) or _is_called_in_a_loop(method, nodes)
        for node in ast.walk(method)
    )
    return next(
        (
            getattr(node, "lineno", None)
            for node in called
            if _removes(node, name) or _begins_anew(node, name)
        ),
        None,
    )


def _is_called_in_a_loop(
    function: ast.FunctionDef | ast.AsyncFunctionDef, nodes: list[ast.AST]
) -> bool:
    loops = (node for node in nodes if isinstance(node, (*_LOOPS, *_COMPREHENSIONS)))
    # What a loop iterates over is called once.
    fields = (getattr(loop, name, []) for loop in loops for name in _REPEATED)
    parts = (part for field in fields for part in (field if isinstance(field, list) else [field]))
    calls = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func).rpartition(".")[2] == function.name for call in calls)


def _removes(node: ast.AST, name: str) -> bool:
    """Return True if a statement removes elements, or replaces ``name`` by a part of it."""
    if isinstance(node, ast.Call):
        if _is_first(node, _TAKES_FROM_FIRST, name):
            return True
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _REMOVING
        return is_method and _is_named(node.func.value, name)  # type: ignore[attr-defined] # checked
    if isinstance(node, ast.Delete):
        return any(
            isinstance(target, ast.Subscript) and _is_named(target, name) for target in node.targets
        )
    values = _assigned(node, name)
    # Such as `name = name[-100:]`.
    slices = (part for value in values if value is not None for part in ast.walk(value))
    return any(
        isinstance(part, ast.Subscript)
        and isinstance(part.slice, ast.Slice)
        and _is_named(part.value, name)
        for part in slices
    )


def _begins_anew(node: ast.AST, name: str) -> bool:
    """Return True if a statement assigns to ``name`` itself, and not what it was and more."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    own = (target for target in _targets(given for given in targets if given is not None))
    is_whole = any(
        not isinstance(target, ast.Subscript) and _is_named(target, name) for target in own
    )
    return is_whole and not _mentions(node.value, name)


def _limits(node: ast.If, name: str, added: set[int]) -> bool:
    """Return True if a condition lets no element be added to ``name`` when it is long."""
    is_short, is_long = (
        _compares_length(node.test, name, *which) for which in ((_LESS, _MORE), (_MORE, _LESS))
    )
    in_body, otherwise = (
        any(
            statement.lineno <= line <= (statement.end_lineno or statement.lineno)
            for statement in part
            for line in added
        )
        for part in (node.body, node.orelse)
    )
    leaves = isinstance(node.body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise))
    # Such as `if len(name) >= 100: return`, with the statement that adds in a later line.
    is_before = leaves and any(node.lineno < line for line in added)
    return (is_short and in_body) or (is_long and (otherwise or is_before))


def _compares_length(
    test: ast.AST, name: str, left: tuple[type, ...], right: tuple[type, ...]
) -> bool:
    """Return True if a condition compares ``len(name)``: by ``left`` if it is left of the operator."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operand = node.left if isinstance(node.ops[0], left) else None
            operand = node.comparators[0] if isinstance(node.ops[0], right) else operand
            if operand is not None and _has_length(operand, name):
                return True
    return False


def _has_length(value: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "len"
        and bool(node.args)
        and _is_named(node.args[0], name)
        for node in ast.walk(value)
    )


@functools.lru_cache(256)
def _keeps(file: str, name: str, *, in_place: bool) -> list[bool]:
    """Return for each statement that adds to ``name`` whether its loop or function keeps what was there."""
    nodes = _nodes(file, name)
    joining = _joining_functions(nodes)
    assigned = [(node, value) for node in nodes for value in _assigned(node, name)]
    joins = [node for node, value in assigned if value is not None and _joins(value, name, joining)]
    others = {
        id(node) for node, _ in assigned if node not in joins and not _is_of_elements(node, name)
    }
    variables = {id(node) for node, _ in assigned if not _has_attribute(node, name)}
    if in_place:
        joins += [node for node in nodes if node not in joins and _addition(node, name)]
        others -= set(map(id, joins))
    # Scopes around one statement lie in each other. So the one with the fewest nodes is the innermost.
    scopes = [list(ast.walk(node)) for node in nodes if isinstance(node, (*_REPEATS, ast.Lambda))]
    innermost = (
        min((scope for scope in scopes if join in scope), key=len, default=[]) for join in joins
    )
    return [
        # A variable or a parameter `k` is not the attribute `self.k`.
        (others - variables if _has_attribute(join, name) else others).isdisjoint(map(id, around))
        for join, around in zip(joins, innermost, strict=True)
    ]


def _has_attribute(node: ast.AST, name: str) -> bool:
    """Return True if a statement assigns to an attribute ``name``, or calls one of its methods."""
    target = getattr(node, "func", getattr(node, "target", None))
    targets = node.targets if isinstance(node, ast.Assign) else [target] if target else []
    return any(
        isinstance(part, ast.Attribute) and part.attr == name
        for given in targets
        for part in ast.walk(given)
    )


def _joining_functions(nodes: list[ast.AST]) -> frozenset[str]:
    """Return the names of functions that return one of their parameters and more, not cut."""
    return frozenset(
        function.name
        for function in nodes
        if isinstance(function, _FUNCTIONS)
        and any(
            isinstance(node, ast.Return)
            and node.value is not None
            and _joins(node.value, parameter.arg)
            for node in ast.walk(function)
            for parameter in function.args.args
        )
    )


def _is_of_elements(node: ast.AST, name: str) -> bool:
    """Return True for an assignment to elements of ``name`` alone, such as ``name[i], name[j] = a, b``."""
    own = _targets(node.targets) if isinstance(node, ast.Assign) else ()
    named = [target for target in own if _is_named(target, name)]
    return bool(named) and all(isinstance(target, ast.Subscript) for target in named)


def _assigned(node: ast.AST, name: str) -> list[ast.AST | None]:
    """Return the values that a node assigns to ``name``; ``None`` for an unknown value."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [node.value] if any(_is_named(target, name) for target in _targets(targets)) else []
    if isinstance(node, ast.AugAssign) and _is_named(node.target, name):
        return [ast.BinOp(node.target, node.op, node.value)]
    if isinstance(node, ast.For) and any(
        _is_named(target, name) for target in _targets([node.target])
    ):
        return [None]
    # A call assigns values to the parameters.
    if isinstance(node, ast.arg) and node.arg == name:
        return [None]
    return []


def _joins(value: ast.AST, name: str, functions: frozenset[str] = frozenset()) -> bool:
    """Return True if a value is ``name`` and more, not cut. ``functions`` join one of their arguments."""
    nodes = list(ast.walk(value))
    # Such as `torch.cat([name, new])[-100:]`, which keeps its length.
    if any(isinstance(node, ast.Slice) for node in nodes):
        return False
    return any(_is_joined(node, name, functions) for node in nodes)


def _is_joined(node: ast.AST, name: str, functions: frozenset[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_named(node.left, name) or _is_named(node.right, name)
    if isinstance(node, ast.Starred):
        return _is_named(node.value, name)
    if isinstance(node, ast.Call):
        func = ast.unparse(node.func).rpartition(".")[2]
        is_join = func in functions or bool(_JOINS.search(func))
        return is_join and any(_mentions(argument, name) for argument in node.args)
    return False


def registrations(file: str) -> list[Addition]:
    """Return the calls in a file that register hooks."""
    return _calls(file, "hook", _REGISTERS)


def added_groups(file: str) -> list[Addition]:
    """Return the calls in a file that add parameters to an optimizer."""
    return _calls(file, _ADDS_GROUP.pattern, _ADDS_GROUP)


def replaced(file: str, line: int) -> str:
    """Return the variable or attribute that a statement replaces by a value made from the old value.

    For ``self.table = concat([self.table, rows])``, return ``self.table``. Return an empty string if the new
    value is not made from the old value. ``line`` is the number of any line of the statement.
    """
    for node in _nodes(file):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and _covers(node, line):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if not isinstance(target, (ast.Name, ast.Attribute)):
                continue
            text = ast.unparse(target)
            names = (
                ast.unparse(part) for part in ast.walk(node.value) if type(part) is type(target)
            )
            if isinstance(node, ast.AugAssign) or text in names:
                return text
    return ""


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _calls(file: str, word: str, method: re.Pattern[str]) -> list[Addition]:
    """Return the calls of methods whose name begins with a match of ``method``.

    Calls in loops and functions come first, because they can run repeatedly. Return nothing if the file does
    not contain ``word``.
    """
    nodes = _nodes(file, word)
    again = {id(inner) for node in nodes if isinstance(node, _REPEATS) for inner in ast.walk(node)}
    calls = (node for node in nodes if isinstance(node, ast.Call))
    methods = ((call, call.func) for call in calls if isinstance(call.func, ast.Attribute))
    matching = [call for call, func in methods if method.match(func.attr)]
    matching.sort(key=lambda call: (id(call) not in again, call.lineno))
    return [Addition(call.lineno, "") for call in matching]


_PARSED: Final[list[dict[str, list[ast.AST]]]] = []
"""Nodes of files, by `parsing_once` blocks."""


@contextmanager
def parsing_once() -> Iterator[None]:
    """Parse each file once within the block. Syntax trees are large, so none is kept after it."""
    _PARSED.append({})
    try:
        yield
    finally:
        _PARSED.pop()


def _nodes(file: str, word: str = "") -> list[ast.AST]:
    """Return the nodes of a source file's syntax tree; empty if the file does not contain ``word``."""
    text = "".join(linecache.getlines(file))
    # Parsing is slow, and many files do not contain the word.
    if not text or len(text) > _MAX_CHARACTERS or word not in text:
        return []
    parsed: dict[str, list[ast.AST]] = next(iter(_PARSED[-1:]), {})
    if text not in parsed:
        try:
            parsed[text] = list(ast.walk(ast.parse(text)))
        # A `ValueError` is for null bytes, and the last two are for code that is nested too deeply.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
    return parsed[text]


def _is_first(call: ast.Call, functions: tuple[str, ...], name: str) -> bool:
    """Return True for a call of one of the functions with ``name`` as the first argument."""
    is_one = ast.unparse(call.func).rpartition(".")[2] in functions
    return is_one and bool(call.args) and _is_named(call.args[0], name)


def _addition(node: ast.AST, name: str) -> list[Addition]:
    if isinstance(node, ast.Call) and _is_first(node, _ADDS_TO_FIRST, name):
        return [Addition(node.lineno, _source(node.args[-1]))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _ADDING and _is_named(node.func.value, name):
            value = node.args[-1] if node.args else None
            return [Addition(node.lineno, _source(value))]
    elif isinstance(node, ast.AugAssign) and _is_named(node.target, name):
        return [Addition(node.lineno, _source(node.value))]
    elif isinstance(node, ast.Assign):
        return [
            Addition(node.lineno, _source(node.value))
            for target in _targets(node.targets)
            if (isinstance(target, ast.Subscript) and _is_named(target.value, name))
            or (_is_named(target, name) and _mentions(node.value, name))
        ]
    return []


def _targets(nodes: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, (ast.Tuple, ast.List)):
            yield from _targets(node.elts)
        else:
            yield node


def _mentions(value: ast.AST, name: str) -> bool:
    return any(_is_named(node, name) for node in ast.walk(value))


def _is_named(node: ast.AST, name: str) -> bool:
    """Return whether an expression is the variable or attribute ``name``, or one of its elements."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id == name
    return isinstance(node, ast.Attribute) and node.attr == name


def _source(node: ast.AST | None) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def shown(file: str, line: int) -> str:
    """Return the text for a line of a file, such as ``train.py:31``."""
    return f"{source_name(file)}:{line}"
