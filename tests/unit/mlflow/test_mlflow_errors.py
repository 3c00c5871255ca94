"""MLflow's errors become one of two errors of memlog's, in one line without a password."""

from __future__ import annotations

import sqlite3

import pytest
import requests
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos import databricks_pb2

from memlog.errors import DeliveryError, TrackerRejectedError, TrackerUnavailableError
from memlog_mlflow.errors import translated, unavailable


def answered(status: int) -> requests.HTTPError:
    """The error that MLflow raises for a file's transfer: not one of its own."""
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status} Client Error for url: http://host/x", response=response)


def translation_of(error: BaseException) -> DeliveryError:
    with pytest.raises(DeliveryError) as caught, translated():
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("odd step", error_code=databricks_pb2.INVALID_PARAMETER_VALUE),
        MlflowException("no run", error_code=databricks_pb2.RESOURCE_DOES_NOT_EXIST),
        MlflowException("odd", error_code=databricks_pb2.BAD_REQUEST),
        RestException({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no run"}),  # type: ignore[no-untyped-call]
        MlflowException("API request to endpoint /x failed with error code 413 != 200."),
        answered(413),
    ],
)
def test_a_refusal_of_mlflow_is_a_rejection(error: Exception) -> None:
    assert isinstance(translation_of(error), TrackerRejectedError)


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("database is locked", error_code=databricks_pb2.TEMPORARILY_UNAVAILABLE),
        MlflowException("too many", error_code=databricks_pb2.REQUEST_LIMIT_EXCEEDED),
        MlflowException("failed with exception: refused"),
        MlflowException("default backend", error_code=databricks_pb2.ENDPOINT_NOT_FOUND),
        requests.ConnectionError("refused"),
        answered(500),
        sqlite3.OperationalError("database is locked"),
        TimeoutError("slow"),
        ModuleNotFoundError("No module named 'psycopg2'"),
    ],
)
def test_anything_else_may_pass(error: Exception) -> None:
    assert isinstance(translation_of(error), TrackerUnavailableError)


@pytest.mark.parametrize(
    "raised",
    [
        MlflowException("no", error_code=databricks_pb2.UNAUTHENTICATED),
        MlflowException("no", error_code=databricks_pb2.PERMISSION_DENIED),
        MlflowException("no", error_code=databricks_pb2.CUSTOMER_UNAUTHORIZED),
        answered(401),
        answered(403),
    ],
)
def test_refused_credentials_are_named_as_such(raised: Exception) -> None:
    error = translation_of(raised)
    assert isinstance(error, TrackerUnavailableError)
    assert "credentials" in str(error)
    assert "MLFLOW_TRACKING_TOKEN" in str(error)


_POOL = (
    "API request to http://anna:s3cret@127.0.0.1:5/health failed with exception "
    "HTTPConnectionPool(host='127.0.0.1', port=5): Max retries exceeded with url: /health (Caused by "
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            _POOL
            + "NewConnectionError('<urllib3.connection.HTTPConnection object at 0x7f>: [Errno 111] "
            "Connection refused'))",
            "MLflow at http://127.0.0.1:5 does not answer (connection refused)",
        ),
        (
            _POOL + "NameResolutionError(\"HTTPConnection(host='h', port=5): Failed to resolve\"))",
            "MLflow at http://127.0.0.1:5 does not answer (no such host name)",
        ),
        (
            _POOL + "ReadTimeoutError('Read timed out. (read timeout=2)'))",
            "MLflow at http://127.0.0.1:5 does not answer (timeout)",
        ),
        (
            "API request to http://anna:s3cret@127.0.0.1:5/api/2.0/mlflow/runs/get failed with exception an "
            "odd one",
            "MLflow is not available (an odd one)",
        ),
        (
            "API request to endpoint /api/2.0/mlflow/runs/get failed with error code 502 != 200. Response "
            "body: '<html><h1>Bad gateway</h1></html>'",
            "MLflow is not available (it answers 502)",
        ),
        (
            "API request to endpoint was successful but the response body was not in a valid JSON format. "
            "Response body: '<html>'",
            "MLflow is not available (another kind of server answers)",
        ),
        (
            '(psycopg2.OperationalError) connection to server at "127.0.0.1", port 5432 failed: '
            "Connection refused (Background on this error at: https://sqlalche.me/e/20/e3q8)",
            "MLflow does not answer (connection refused)",
        ),
    ],
)
def test_an_absent_server_is_reported_in_short_and_in_full(message: str, expected: str) -> None:
    error = translation_of(MlflowException(message))
    assert isinstance(error, TrackerUnavailableError)
    assert str(error) == expected
    assert error.detail == message.replace("anna:s3cret@", "")


def test_memlogs_own_errors_pass_as_they_are() -> None:
    mine = TrackerRejectedError("mine")
    assert translation_of(mine) is mine


def test_a_message_is_one_short_line_without_credentials_and_rows() -> None:
    text = (
        "(sqlite3.OperationalError) database is locked at\nhttp://anna:s3cret@host/x\n"
        "[SQL: INSERT INTO metrics VALUES (?)]\n[parameters: [('row')]]"
    )
    error = translation_of(MlflowException(text + "x" * 5000))
    assert "\n" not in str(error)
    assert "s3cret" not in str(error)
    assert "INSERT" not in str(error)
    assert "database is locked" in str(error)
    assert len(str(translation_of(MlflowException("y" * 5000)))) < 600
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (
            "http://127.0.0.1:5/prefix",
            "MLflow at http://127.0.0.1:5/prefix does not answer (timeout)",
        ),
        (
            "https://anna:s3cret@tracker.example",
            "MLflow at https://tracker.example leads to http://127.0.0.1:5, which does not answer (timeout)",
        ),
    ],
)
def test_a_server_that_redirects_to_one_that_is_away_names_both(
    address: str, expected: str
) -> None:
    error = unavailable(_POOL + "ReadTimeoutError('Read timed out. (read timeout=2)'))", address)
    assert str(error) == expected
