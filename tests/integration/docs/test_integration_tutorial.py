"""The integration in the tutorial integrations/README.md keeps the contract that the tutorial checks."""

import re
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "integrations" / "README.md"
FILES = dict(
    re.findall(
        r'^```python title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
)

pytestmark = pytest.mark.integration

memlog_csv = types.ModuleType("memlog_csv")
exec(compile(FILES["memlog_csv.py"], "memlog_csv.py", "exec"), memlog_csv.__dict__)  # noqa: S102 - the page's
sys.modules["memlog_csv"] = memlog_csv
exec(compile(FILES["test_memlog_csv.py"], "test_memlog_csv.py", "exec"))  # noqa: S102 - it defines TestCsv


@pytest.fixture(scope="module", autouse=True)
def _csv_module() -> Iterator[None]:
    yield
    del sys.modules["memlog_csv"]


def test_it_is_as_short_as_the_page_says() -> None:
    assert len(FILES["memlog_csv.py"].splitlines()) < 100


def test_a_session_finds_it_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memlog import sink

    registered = EntryPoint("csv", "memlog_csv:backend", sink.ENTRY_POINT_GROUP)
    monkeypatch.setattr("memlog.sink.search._entry_points", lambda: EntryPoints([registered]))
    monkeypatch.chdir(tmp_path)
    backend = sink.load_backend("csv")
    assert isinstance(
        backend.open_sink(sink.Target("r", None, connection=backend.connection())), sink.Sink
    )


def test_a_broken_sink_fails_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = globals()["TestCsv"]()
    contract.disk = tmp_path / "disk"
    contract.disk.mkdir()
    contract.test_a_point_that_is_there_changes_nothing()
    code = FILES["memlog_csv.py"].replace("stored = set(known)", "stored = set()")
    broken: dict[str, object] = {"__name__": "memlog_csv"}
    exec(compile(code, "memlog_csv.py", "exec"), broken)  # noqa: S102 - the page's code without a line
    monkeypatch.setattr(memlog_csv, "CsvSink", broken["CsvSink"])
    with pytest.raises((AssertionError, ValueError)):
        contract.test_a_point_that_is_there_changes_nothing()
