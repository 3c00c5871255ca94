"""Translate wandb's errors into memlog's: temporary errors and permanent refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wandb.errors import AuthenticationError, UsageError

from memlog._internal.connections import (
    address_in,
    does_not_answer,
    in_full,
    in_short,
    reason_of,
)
from memlog.errors import (
    MemlogError,
    TrackerRejectedError,
    TrackerUnavailableError,
    UnknownRunError,
)

LOG_IN = "run `wandb login`, set WANDB_API_KEY, or record without a server: WANDB_MODE=offline"
_NO_RUN = "Could not find run"
_NAMED_RUN = re.compile(r"<Run (?P<path>\S+)")
_ANSWERED = re.compile(r"returned error (?P<status>\d{3})\b")
_NOT_LOGGED_IN = ("api_key", "API key", "wandb login", "not logged in")
_NOT_REACHED = ("Failed to execute API request", "Failed to initialize API", "error 5")
"""Texts that show that wandb could not reach the server. wandb raises an authentication error in this case,
too."""
_FATAL = "filestream: fatal error"
_MAX_TEXT = 300
_REFUSED = re.compile(r"\b40[13]\b|permission denied|PERMISSION_ERROR|user is not logged in")


@contextmanager
def translated() -> Iterator[None]:
    """Translate the errors of a block that calls W&B.

    Raises:
        TrackerRejectedError: W&B has refused the request.
        UnknownRunError: W&B has no such run.
        TrackerUnavailableError: any other error.
    """
    try:
        yield
    except MemlogError:
        raise
    except Exception as error:  # noqa: BLE001 - wandb lets its service's and system errors through
        # Not chained: the original's message may contain credentials.
        raise _translation(error) from None


def unavailable(text: str, address: str | None = None) -> TrackerUnavailableError:
    """Return the error for a server that can't be reached or fails.

    Args:
        text: Description of the failure, such as a client's message.
        address: Address of the server; ``None``: use the address in ``text``.
    """
    detail = in_full(text)
    reason = reason_of(text)
    if reason and (address or address_in(text)):
        return TrackerUnavailableError(does_not_answer("W&B", address, text, reason), detail)
    return TrackerUnavailableError(f"W&B is not available ({_one_line(text)})", detail)


def rows_given_up(log: Path) -> str | None:
    """Return the reason why wandb's process gave up uploading rows; ``None`` if it did not give up.

    wandb reports this only in its log. If the server answers an upload with 401 or 403, for example, wandb
    makes no further uploads, and ``finish`` raises no error. The rows stay in wandb's local file.

    Args:
        log: wandb's log, which is named by ``log_internal`` in a run's settings. Each line is a JSON object.
    """
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if _FATAL in line:
                    return line[line.index(_FATAL) :].strip()[:_MAX_TEXT].rstrip('"}')
    except OSError:  # there is no log, so nothing is known
        return None
    return None


def _translation(error: Exception) -> MemlogError:
    text = f"{type(error).__name__}: {error}"
    refused = _REFUSED.search(text) is not None
    not_reached = any(word in text for word in _NOT_REACHED)
    if refused or (isinstance(error, AuthenticationError) and not not_reached):
        return TrackerUnavailableError(
            f"W&B does not take the credentials ({_one_line(text)}): {LOG_IN}", in_full(text)
        )
    if isinstance(error, UsageError) and any(word in text for word in _NOT_LOGGED_IN):
        return TrackerUnavailableError(f"you are not logged in to W&B: {LOG_IN}")
    if _NO_RUN in text:
        named = _NAMED_RUN.search(text)
        return UnknownRunError(
            f"W&B has no run {_one_line(named['path']) if named else 'of this name'}: name it as "
            "entity/project/id, or set WANDB_ENTITY and WANDB_PROJECT"
        )
    if isinstance(error, (UsageError, TypeError, ValueError)):
        return TrackerRejectedError(f"W&B refused it: {_one_line(text)}", in_full(text))
    return unavailable(text)


def _one_line(text: str) -> str:
    """Return ``text`` on one line, without credentials. From a server's answer, keep only the status."""
    answered = _ANSWERED.search(text)
    return f"it answers {answered['status']}" if answered else in_short(text)
