"""A new SQLite database is whole or not there, whenever its maker is killed."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import child

pytestmark = pytest.mark.integration

MAKER = """
    import sys
    from pathlib import Path
    from memlog_mlflow.databases import make_if_missing

    print("ready", flush=True)
    make_if_missing(f"sqlite:///{Path('mlflow.db').absolute()}")
"""


def tables(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        found: int = database.execute("select count(*) from sqlite_master").fetchone()[0]
    return found


def test_a_killed_maker_leaves_nothing_half(tmp_path: Path) -> None:
    whole = 0
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        process = child.start(MAKER, directory)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5 * attempt)
        if attempt == 4:
            process.wait(timeout=60)
        process.kill()
        process.communicate(timeout=60)
        if (directory / "mlflow.db").exists():
            whole += 1
            assert tables(directory / "mlflow.db") > 20
    assert 1 <= whole < 5


def test_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    from memlog_mlflow.databases import make_if_missing

    (tmp_path / "mlflow.db").write_bytes(b"the user's")
    make_if_missing(f"sqlite:///{tmp_path}/mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == b"the user's"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
