"""``mlflow server`` in one process. MLflow's own command starts uvicorn in a second process."""

import os
import sys
from typing import Any

import mlflow.server
import uvicorn
from mlflow.cli import cli


def _run_here(command: list[str], extra_env: dict[str, str], **_: Any) -> None:
    os.environ.update(extra_env)
    # These modules read the variables when they are imported.
    for name in ("mlflow.server", "mlflow.server.fastapi_app"):
        sys.modules.pop(name, None)
    uvicorn.main(command[3:])  # without the first words, `python -m uvicorn`


os.setsid()
mlflow.server._exec_cmd = _run_here
cli(sys.argv[1:])
