"""Create a new SQLite database atomically.

MLflow's client takes seconds to create the tables. If the process were killed meanwhile, the user's folder
would have a file that MLflow can't open.
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
    """Create the database if ``uri`` names an SQLite file that does not exist yet.

    Raises:
        OSError: the file can't be written.
        MlflowException: MLflow can't create the database.
    """
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    with tempfile.TemporaryDirectory(prefix="memlog-") as folder:
        made = Path(folder) / "mlflow.db"
        # Any request makes MLflow create the tables, and the default experiment.
        MlflowClient(f"sqlite:///{made}").search_experiments(max_results=1)
        with made.open("rb") as whole, beside(path) as (copy, temporary):
            shutil.copyfileobj(whole, copy)
            copy.flush()
            # Linking fails if another process, such as the user's client, has created the file meanwhile. It
            # also fails if the file system has no links. Then MLflow's client creates the database as usual.
            with suppress(OSError):
                os.link(temporary, path)
