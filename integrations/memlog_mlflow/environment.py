"""Environment variables that MLflow's client reads. memlog adapts them for its helper process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from memlog._internal.connections import secret_names
from memlog.sink import ClientVariables, Connection
from memlog_mlflow.uris import absolute_uri

TRACKING_URI = "MLFLOW_TRACKING_URI"
RUN_CONTEXT = "MLFLOW_RUN_CONTEXT"
"""MLflow's variable with the tags of new runs. The value is a JSON object."""

_OF_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "DATABRICKS_")
"""Prefixes of variables with a cloud's credentials. `credentials` leaves them out, because MLflow's client
sends them to that cloud only."""
_OF_DATABASES = ("PGPASSWORD", "MYSQL_PWD")
_CREDENTIALS = "~/.mlflow/credentials"

_NEVER = (
    "MLFLOW_RUN_ID",  # a process with this variable marks the run as finished when it exits
    "MLFLOW_ACTIVE_MODEL_ID",  # memlog's metrics would be attributed to the user's model, too
    "_MLFLOW_ACTIVE_MODEL_ID",
    "MLFLOW_SQLALCHEMYSTORE_ECHO",  # prints every SQL statement
)

_BOUNDS = {
    # The uploader tries again itself. MLflow's seven retries would block it for four minutes, and a repeated
    # "create run" could create two runs.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "20",
    # The user did not start this process: it prints nothing and sends no telemetry.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_VARIABLES = ClientVariables(
    ("MLFLOW_", *_OF_CLOUDS), frozenset({"CURL_CA_BUNDLE"}), never=_NEVER, always=_BOUNDS
)


def gathered() -> dict[str, str]:
    """Return the environment variables of this process that MLflow's client needs in the helper."""
    found = _VARIABLES.gathered()
    if TRACKING_URI in found:
        # A relative path is relative to this process's working directory. The helper's may be another one.
        found[TRACKING_URI] = absolute_uri(found[TRACKING_URI])
    if sys.argv and sys.argv[0]:
        found[RUN_CONTEXT] = _with_source(found.get(RUN_CONTEXT), sys.argv[0])
    return found


def credentials() -> tuple[str, ...]:
    """Return the names of variables and files whose credentials MLflow's client would send to all servers."""
    found = {name: text for name, text in gathered().items() if not name.startswith(_OF_CLOUDS)}
    named = [*secret_names(found), *(name for name in _OF_DATABASES if os.environ.get(name))]
    if Path(_CREDENTIALS).expanduser().exists():
        named.append(_CREDENTIALS)
    return tuple(named)


def apply(connection: Connection) -> None:
    """Set the environment variables of MLflow's client. Limit the size and duration of servers' answers.

    Call this function only in a process of memlog's own, before the import of mlflow. mlflow reads some of
    the variables only during the import.
    """
    from memlog._internal.connections import bound_answers  # noqa: PLC0415 - the training process needs no HTTP client

    bound_answers()
    _VARIABLES.apply(connection)
    # Seconds. A value that the user has set is kept. A slow server may need more time, and every request
    # would fail with less.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")


def context_tags() -> dict[str, str]:
    """Return the tags in `RUN_CONTEXT`; no tags if its value is not a JSON object."""
    return _parsed(os.environ.get(RUN_CONTEXT))


def _with_source(context: str | None, script: str) -> str:
    """Return the value of `RUN_CONTEXT` with the training script as the run's source.

    A source that the user has named is kept. The training process must pass the script's name, because
    ``sys.argv[0]`` is memlog in the helper.
    """
    return json.dumps({"mlflow.source.name": script, **_parsed(context)})


def _parsed(context: str | None) -> dict[str, str]:
    try:
        tags = json.loads(context or "{}")
    except ValueError:
        return {}
    if not isinstance(tags, dict):
        return {}
    return {name: str(value) for name, value in tags.items()}
