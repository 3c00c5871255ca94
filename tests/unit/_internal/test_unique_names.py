"""A public name at the level of a module means one thing in all of memlog."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MEMLOG = Path(__file__).parents[3] / "memlog"
ALIKE = {
    "CATEGORIES",
    "FILE",
    "INTERVAL",
    "KIND",
    "ORDERS",
    "PAGE",
    "SCHEMA",
    "TEMPORARIES",
    "WINDOW",
}
"""Names that say the same thing of several modules, such as the version of a command's document."""


def definitions(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each class, alias and constant of a module."""
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            yield statement.name, ast.dump(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            single = isinstance(statement, ast.AnnAssign)
            for target in [statement.target] if single else statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, ast.dump(statement.value)


def test_a_public_name_is_defined_with_one_value() -> None:
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for file in MEMLOG.rglob("*.py"):
        for name, value in definitions(ast.parse(file.read_text(encoding="utf-8"))):
            if name[0].isupper():
                found[name][str(file.relative_to(MEMLOG))] = value
    assert len(found) > 500
    several = {name: sorted(by) for name, by in found.items() if len(set(by.values())) > 1}
    assert {name: by for name, by in several.items() if name not in ALIKE} == {}
