"""``mlflow server`` in one process. MLflow's own command starts uvicorn in a second process."""

import os
import sys
from typing import Any

import mlflow.server
import uvicorn
from mlflow.cli import cli


def _run_here(command: list[str], extra_env: dict[str, str], **_: Any) -> None:
    os.environ.update(extra_env)
    for name in (
        "mlflow.server",
        "mlflow.server.fastapi_app",
    ):  # they read the environment variables
        sys.modules.pop(name, None)
    uvicorn.main(command[3:])  # behind `python -m uvicorn`


os.setsid()
mlflow.server._exec_cmd = _run_here
cli(sys.argv[1:])
