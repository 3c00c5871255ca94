"""The environment variables that MLflow's client reads: carried to the helper, bounded there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from memlog._internal.credential_scope import secret_names
from memlog.sink import Connection
from memlog_mlflow.uris import absolute_uri

TRACKING_URI = "MLFLOW_TRACKING_URI"
RUN_CONTEXT = "MLFLOW_RUN_CONTEXT"
"""MLflow's own variable for tags that a run gets when it is created, as a JSON object."""

_PREFIXES = ("MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "DATABRICKS_")
_NAMES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})

_OF_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "DATABRICKS_")
"""Variables whose credentials go to, or are good for, their own cloud alone, whatever the tracker."""
_OF_DATABASES = ("PGPASSWORD", "MYSQL_PWD")
_CREDENTIALS = "~/.mlflow/credentials"

_NEVER = (
    "MLFLOW_RUN_ID",  # a process that has it marks that run as finished when it exits
    "MLFLOW_ACTIVE_MODEL_ID",  # memlog's metrics would be attributed to the user's model as well
    "_MLFLOW_ACTIVE_MODEL_ID",
    "MLFLOW_SQLALCHEMYSTORE_ECHO",  # prints every SQL statement
)

_BOUNDS = {
    # The uploader tries again itself; MLflow's seven retries would hold it for four minutes, and a
    # repeated "create run" could make two.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "20",
    # A process that the user never asked for prints nothing and reports to nobody.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

_DEFAULTS = {
    # Seconds. A user who set it knows that the server is slow: one that never answers in time would
    # never get anything.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def gathered() -> dict[str, str]:
    """What MLflow's client reads of this process's environment, for the helper."""
    found = {name: value for name, value in os.environ.items() if _is_wanted(name)}
    if TRACKING_URI in found:
        # A relative path means this process's folder, which may not be the helper's.
        found[TRACKING_URI] = absolute_uri(found[TRACKING_URI])
    if sys.argv and sys.argv[0]:
        found[RUN_CONTEXT] = _with_source(found.get(RUN_CONTEXT), sys.argv[0])
    return found


def credentials() -> tuple[str, ...]:
    """Variables and files from which MLflow's client takes credentials, whatever the address."""
    found = {name: text for name, text in gathered().items() if not name.startswith(_OF_CLOUDS)}
    named = [*secret_names(found), *(name for name in _OF_DATABASES if os.environ.get(name))]
    if Path(_CREDENTIALS).expanduser().exists():
        named.append(_CREDENTIALS)
    return tuple(named)


def apply(connection: Connection) -> None:
    """Prepares this process, one of memlog's own, for MLflow's client.

    To be called before mlflow is imported, which reads some of these variables only then.
    """
    from memlog._internal.response_limits import bound_answers  # noqa: PLC0415 - the trainer's process needs no HTTP client

    bound_answers()
    os.environ.update(connection.environment)
    for name in _NEVER:
        os.environ.pop(name, None)
    os.environ.update(_BOUNDS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def context_tags() -> dict[str, str]:
    """The tags that `RUN_CONTEXT` asks for; none where it is not a JSON object."""
    return _parsed(os.environ.get(RUN_CONTEXT))


def _is_wanted(name: str) -> bool:
    if name in _NEVER:
        return False
    return name.startswith(_PREFIXES) or name in _NAMES or name.lower() in _PROXIES


def _with_source(context: str | None, script: str) -> str:
    """`RUN_CONTEXT` with the training script as the run's source, unless the user names another.

    In the helper ``sys.argv[0]`` is memlog, so the script has to come along.
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
