"""docs/project/seeds.md, and the check of its promises at the end of a run of all tests."""

import ast
import re
from pathlib import Path

import pytest
from support.seeds import OUTCOMES, PAGE, ROWS, Row, SeedsPlugin, read_rows, unshown

PAGE_ROWS = read_rows(PAGE.read_text(encoding="utf-8"))


def test_every_row_is_there_once_with_an_outcome() -> None:
    assert [row.number for row in PAGE_ROWS] == list(range(1, ROWS + 1))
    assert {row.outcome for row in PAGE_ROWS} <= set(OUTCOMES)
    shown = [row for row in PAGE_ROWS if row.outcome in ("kept", "better")]
    assert all(row.tests for row in shown)


def test_the_check_finds_what_is_not_shown() -> None:
    rows = [Row(1, "kept", ("test_a",)), Row(2, "refused", ()), Row(3, "better", ("test_b",))]
    marked = {"test_a": {1}, "test_b": {3}}
    assert unshown(rows, marked, {"test_a", "test_b"}) == []
    assert unshown(rows, marked, {"test_a"}) == ["row 3 says better: none of its tests ran"]
    assert unshown(rows, {"test_a": {1, 2}}, {"test_a", "test_b"}) == [
        "row 3: test_b does not bear its number",
        "row 2: the page does not name test_a",
    ]


def test_the_page_and_the_tests_name_each_other() -> None:
    """Quicker than the run of all tests, which judges what ran."""
    marked: dict[str, set[int]] = {}
    for path in Path(__file__).parents[2].rglob("test_*.py"):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if "mark.seed(" in source else []:
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                found = [mark for mark in marks if mark.startswith("pytest.mark.seed(")]
                numbers = {int(number) for mark in found for number in re.findall(r"\d+", mark)}
                marked.setdefault(node.name, set()).update(numbers)
    assert unshown(PAGE_ROWS, marked, marked) == []


PROBE = """
import pytest

@pytest.mark.seed(1)
@pytest.mark.parametrize("x", [1, 2])
def test_a(x):
    assert x

@pytest.mark.seed(2)
def test_b():
    {}
"""


@pytest.mark.parametrize(
    ("body", "options", "code"),
    [
        ("pass", [], 0),
        ("assert False", [], 1),
        ("pytest.skip('no GPU')", [], 4),
        ("pytest.skip('no GPU')", ["-k", "test_b"], 0),
        ("pytest.skip('no GPU')", ["tests/test_it.py"], 0),
    ],
)
def test_a_whole_run_fails_where_the_page_says_more(
    body: str,
    options: list[str],
    code: int,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = pytester.path / "seeds.md"
    page.write_text("| 1 | one | kept | `test_a` |\n| 2 | two | better | it is; `test_b` |\n")
    monkeypatch.setattr("support.seeds.PAGE", page)
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers =\n    seed: rows\n")
    pytester.mkdir("tests").joinpath("test_it.py").write_text(PROBE.format(body))
    result = pytester.inline_run(*options, "-p", "no:cacheprovider", plugins=[SeedsPlugin()])
    assert result.ret == code
