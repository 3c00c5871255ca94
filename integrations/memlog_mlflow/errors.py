"""Translate MLflow's errors into memlog's: temporary errors and permanent refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException

from memlog._internal.connections import does_not_answer, in_full, in_short, reason_of
from memlog.errors import (
    DeliveryError,
    MemlogError,
    TrackerRejectedError,
    TrackerUnavailableError,
)

_REJECTED = frozenset(
    {
        "ALREADY_EXISTS",
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""Error codes that count as permanent refusals. All other codes count as temporary errors. For example, a
proxy answers ENDPOINT_NOT_FOUND while it restarts."""

_REFUSED = frozenset({"CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED", "UNAUTHENTICATED"})
_REFUSALS = frozenset({401, 403})
_TOO_LARGE = 413
_ANSWERED = re.compile(r"failed with error code (\d{3}) != 200|too many (\d{3}) error responses")
_REQUEST = re.compile(r"API request to \S+ failed with exception ")
"""Beginning of an error message of MLflow's client. memlog removes this part and keeps the reason."""
_NO_JSON = "not in a valid JSON format"
_NO_SERVER = "MLflow is not available (another kind of server answers)"
_NOISE = re.compile(r"\[SQL:|\(Background on this error")
"""Beginning of the part of a database's error message that memlog cuts off. This part contains
the rows of the failed statement, and a link."""


@contextmanager
def translated(address: str | None = None) -> Iterator[None]:
    """Translate the errors of a block that calls MLflow.

    Args:
        address: MLflow's address, for messages; ``None``: use the address in the client's message.

    Raises:
        TrackerRejectedError: MLflow has refused the request.
        TrackerUnavailableError: any other error.
    """
    try:
        yield
    except MemlogError:
        raise
    except Exception as error:  # noqa: BLE001 - MLflow lets drivers' and system errors through
        # Not chained: the original's message may contain the URL with its password.
        raise _translation(error, address) from None


def refused(status: str) -> TrackerUnavailableError:
    """Return the error for credentials that the server does not accept."""
    return TrackerUnavailableError(
        f"the MLflow server refuses the credentials ({status}): set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    )


def unavailable(text: str, address: str | None = None) -> TrackerUnavailableError:
    """Return the error for a tracker that can't be reached or fails.

    Args:
        text: Description of the failure, such as a client's message.
        address: Address of the tracker; ``None``: use the address in ``text``.
    """
    detail = in_full(text)
    if answered := _ANSWERED.search(text):
        told = f"MLflow is not available (it answers {answered[1] or answered[2]})"
    elif _NO_JSON in text:
        told = _NO_SERVER
    elif reason := reason_of(text):
        told = does_not_answer("MLflow", address, text, reason)
    else:
        told = f"MLflow is not available ({_one_line(_REQUEST.sub('', text))})"
    return TrackerUnavailableError(told, detail)


def error_code(error: BaseException) -> str | None:
    """Return the code that MLflow gave ``error``; ``None`` if MLflow did not raise ``error``."""
    return str(error.error_code) if isinstance(error, MlflowException) else None


def _translation(error: Exception, address: str | None) -> DeliveryError:
    code, status = error_code(error), _http_status(error)
    if code in _REFUSED or status in _REFUSALS:
        return refused(str(status or code))
    text = str(error) if code is not None else f"{type(error).__name__}: {error}"
    # A proxy's "request too large" has no code of MLflow's. It counts as a refusal, because the uploader
    # sends smaller batches after a refusal.
    too_large = status == _TOO_LARGE or f"failed with error code {_TOO_LARGE} " in text
    if code in _REJECTED or too_large:
        return TrackerRejectedError(f"MLflow refused it: {_one_line(text)}", in_full(text))
    return unavailable(text, address)


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status of an error; ``None`` if the error has no status.

    If the transfer of a file fails, MLflow's client raises an error of the HTTP library, with a status.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _one_line(text: str) -> str:
    """Return ``text`` on one line, without credentials. Cut off the part that begins with `_NOISE`."""
    return in_short(_NOISE.split(text)[0])
