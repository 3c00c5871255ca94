"""Making a new SQLite database whole or not at all.

MLflow's client makes its tables one after the other, for seconds. A process that is killed meanwhile would
leave a file in the user's folder that MLflow itself can't open any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from mlflow import MlflowClient

from memlog._internal.safe_files import beside
from memlog_mlflow.uris import sqlite_file


def make_if_missing(uri: str) -> None:
    """Makes the database that ``uri`` names, where that is a file that does not exist yet.

    Raises:
        OSError: it can't be written.
        MlflowException: MLflow can't make one.
    """
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    with tempfile.TemporaryDirectory(prefix="memlog-") as folder:
        made = Path(folder) / "mlflow.db"
        # Asking for anything makes the tables, and the experiment that is there from the beginning.
        MlflowClient(f"sqlite:///{made}").search_experiments(max_results=1)
        with made.open("rb") as whole, beside(path) as (copy, temporary):
            shutil.copyfileobj(whole, copy)
            copy.flush()
            # Somebody else, such as the user's client, was first; or there are no links in that file system,
            # and MLflow's client makes it as it always does.
            with suppress(OSError):
                os.link(temporary, path)
