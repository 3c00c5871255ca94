"""If the process that creates an SQLite database is killed, the database is complete or does not exist."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import child

pytestmark = pytest.mark.integration

MAKER = """
    import mlflow
    import tempfile
    from pathlib import Path

    from memlog_mlflow.databases import make_if_missing

    tempfile.tempdir = str(Path.cwd())
    make_if_missing(f"sqlite:///{Path('mlflow.db').absolute()}")
"""


def tables(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        found: int = database.execute("select count(*) from sqlite_master").fetchone()[0]
    return found


def test_a_killed_maker_leaves_nothing_half(tmp_path: Path) -> None:
    made = tmp_path / "mlflow.db"
    process = child.start(MAKER, tmp_path)
    while process.poll() is None and not list(tmp_path.glob("memlog-*/mlflow.db")):
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    # Usually the database is missing: to create its tables takes a second.
    assert not made.exists() or tables(made) > 20
    child.run(MAKER, tmp_path)
    assert tables(made) > 20


def test_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    from memlog_mlflow.databases import make_if_missing

    (tmp_path / "mlflow.db").write_bytes(b"the user's")
    make_if_missing(f"sqlite:///{tmp_path}/mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == b"the user's"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
