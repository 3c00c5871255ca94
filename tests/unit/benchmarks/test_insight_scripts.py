"""The scripts of benchmarks/insight and the table of what is true about them fit together."""

import ast
import re

import pytest

from benchmarks.insight.expected import KINDS, Expected, load, marked_lines
from benchmarks.insight.series import SCRIPTS

TABLE = load()
NAMES = sorted(TABLE)


def test_the_table_names_every_script_and_no_other() -> None:
    assert set(TABLE) == {path.stem for path in SCRIPTS.glob("*.py")}


def test_there_are_enough_of_both_sorts() -> None:
    assert sum(record.faulty for record in TABLE.values()) >= 40
    assert sum(not record.faulty for record in TABLE.values()) >= 26


@pytest.mark.parametrize("name", NAMES)
def test_a_script_compiles_explains_itself_and_stands_alone(name: str) -> None:
    script = (SCRIPTS / f"{name}.py").read_text()
    assert 'os.environ.get("SEED"' in script
    tree = ast.parse(script)
    assert ast.get_docstring(tree)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(module.split(".")[0] in {"memlog", "benchmarks"} for module in imported)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_complete(name: str) -> None:
    record: Expected = TABLE[name]
    assert re.match(r"https://(github|discuss\.pytorch)\.[a-z]+/\S+/\d+\S*$", record.source)
    assert set(record.kinds) <= KINDS
    assert bool(record.kinds) == bool(record.where) == record.faulty
    assert len(marked_lines(name)) == record.faulty
    assert 0 <= record.rate_mib[0] <= record.rate_mib[1]
    assert record.faulty or record.rate_mib[1] == 0
