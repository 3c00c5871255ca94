"""Private parts of torch are named in one room, with what happens without each."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlog.torchside import MISSING

REPOSITORY = Path(__file__).parents[3]
ROOM = REPOSITORY / "memlog" / "torchside"


def is_private(name: str) -> bool:
    # Operators of ATen are no parts of the Python package, also with an underscore.
    return (
        name.startswith("torch.")
        and not name.startswith("torch.ops.aten.")
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    )


class Names(ast.NodeVisitor):
    """Dotted names of torch's parts in a module, whichever way the module gets at them."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self.found: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self.found.add(f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._add(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and " " not in node.value and "\n" not in node.value:
            self.found.add(node.value)

    def _add(self, node: ast.AST) -> None:
        name = self.name_of(node)
        if name is not None:
            self.found.add(name)
        self.generic_visit(node)

    def name_of(self, node: ast.AST) -> str | None:  # noqa: PLR0911 - one way each
        match node:
            case ast.Name(id=name):
                return self.aliases.get(name, name)
            case ast.Attribute(value=owner, attr=part):
                return self._inside(owner, part)
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=name)):
                return str(name)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="modules"), attr="get")):
                return self._text(node.args[0])
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, part, *_]):
                text = self._text(part)
                return None if text is None else self._inside(owner, text)
            case ast.Call(func=ast.Name(id="_find"), args=[ast.Constant(value=path)]):
                return f"torch.{path}"
        return None

    def _inside(self, owner: ast.AST, part: str) -> str | None:
        name = self.name_of(owner)
        return None if name is None else f"{name}.{part}"

    def _text(self, node: ast.AST) -> str | None:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "KIND" for part in parts
                )
        return None


def private_parts_in(path: Path) -> set[str]:
    names = Names()
    names.visit(ast.parse(path.read_text()))
    return set(filter(is_private, names.found))


def modules() -> Iterator[Path]:
    for folder in ("memlog", "integrations"):
        yield from (REPOSITORY / folder).rglob("*.py")


def test_other_rooms_name_no_private_part() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): names
        for path in modules()
        if ROOM not in path.parents and (names := private_parts_in(path))
    }
    assert found == {}


def test_the_table_has_each_part_once() -> None:
    table = [name for names in MISSING.values() for name in names]
    assert len(table) == len(set(table))
    named = set[str]().union(
        *(private_parts_in(path) for path in ROOM.glob("*.py") if path.name != "__init__.py")
    )
    assert set(table) - named == set()
    # A name within another one, such as a module, is a part of the way to it.
    whole = {name for name in named if not any(one.startswith(f"{name}.") for one in named)}
    assert whole - set(table) == set()


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C.TensorBase",
        "from torch.utils._pytree import tree_map",
        "from torch import nn\nnn.init._no_grad_fill_(x)",
        "import sys\nsys.modules['torch']._C",
        "import sys\ngetattr(sys.modules.get('torch.autograd'), '_get_sequence_nr')",
        "getattr(torch._C, f'_{kind}_memoryStats')",
        "name = 'torch._dynamo.utils'",
    ],
)
def test_each_way_to_a_private_part_is_seen(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert private_parts_in(path)
