"""Check of docs/project/seeds.md: each row marked "kept" must name tests that have its number and ran.

This is a pytest plugin, which `tests/conftest.py` switches on. The plugin judges only runs of all tests.
"""

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "project" / "seeds.md"
OUTCOMES = ("kept", "better", "refused")
ROWS = 283
_ROWS = "seeds"
"""Key under which a test's properties keep its row numbers."""


class Row(NamedTuple):
    """A row of docs/project/seeds.md: a promise and its state."""

    number: int
    outcome: str
    tests: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    lines = re.findall(r"^\| (\d+) \| .* \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    return [
        Row(int(number), outcome, tuple(re.findall(r"`(test_\w+)`", where)))
        for number, outcome, where in lines
    ]


def unshown(rows: Iterable[Row], marked: Mapping[str, set[int]], ran: Container[str]) -> list[str]:
    """Return the promises for which a run of all tests has no proof, a line each.

    ``marked`` has the rows that each test's marks name. ``ran`` has the tests that were not skipped.
    """
    wrong = []
    for row in rows:
        if row.outcome not in ("kept", "better"):
            continue
        strangers = [name for name in row.tests if row.number not in marked.get(name, set())]
        wrong += [f"row {row.number}: {name} does not bear its number" for name in strangers]
        if not any(name in ran for name in row.tests):
            wrong.append(f"row {row.number} says {row.outcome}: none of its tests ran")
    named = {(name, row.number) for row in rows for name in row.tests}
    for name, numbers in marked.items():
        wrong += [
            f"row {number}: the page does not name {name}"
            for number in numbers
            if (name, number) not in named
        ]
    return wrong


class SeedsPlugin:
    """Plugin that collects marks and results, and judges them at the end.

    Tests may run in worker processes. Their reports contain each test's rows, and the controller judges.
    """

    def __init__(self) -> None:
        self.marked: dict[str, set[int]] = {}
        self.ran: set[str] = set()
        self.whole = True
        self.wrong: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Find out if this process is the controller of a run of all tests."""
        option = config.option
        narrowed = option.collectonly or option.keyword or option.markexpr or option.deselect
        again = config.getoption("lf", False) or config.getoption("stepwise", False)
        everything = config.args == config.getini("testpaths") and not (narrowed or again)
        self.whole = everything and not hasattr(config, "workerinput")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            rows = {row for mark in item.iter_markers("seed") for row in mark.args}
            item.user_properties.append((_ROWS, sorted(rows)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.location[2].partition("[")[0].rpartition(".")[2]
        for key, rows in report.user_properties:
            if key == _ROWS:
                self.marked.setdefault(name, set()).update(rows)
        if report.failed or (report.when == "call" and report.passed):
            self.ran.add(name)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # A test that failed runs once more, alone, and judges for itself.
        if self.whole and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.wrong = unshown(read_rows(PAGE.read_text("utf-8")), self.marked, self.ran)
            if self.wrong:
                # Not TESTS_FAILED: running tests again would hide it, or find none to run.
                session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.wrong:
            terminalreporter.section(
                "docs/project/seeds.md says more than this run showed", red=True
            )
            for line in self.wrong:
                terminalreporter.write_line(line)
