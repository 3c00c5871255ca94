"""Translation of wandb's errors into memlog's."""

from pathlib import Path

import pytest
from wandb.errors import AuthenticationError, CommError, UsageError

from memlog.errors import MemlogError, TrackerRejectedError, TrackerUnavailableError
from memlog_wandb.errors import LOG_IN, rows_given_up, translated

FATAL = (
    '{"time":"2026-11-21T16:32:17Z","level":"ERROR+4","msg":"filestream: fatal error: filestream: '
    'failed to upload: 401 Unauthorized url=http://127.0.0.1/files/e/p/r/file_stream: {}"}\n'
)


def met(error: Exception) -> MemlogError:
    with pytest.raises(MemlogError) as caught, translated():
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError("Failed to verify credentials with http://h: returned error 401"),
        AuthenticationError("the key has 39 characters"),
        CommError("returned error 403: permission denied"),
    ],
)
def test_a_refusal_names_the_way_to_log_in(error: Exception) -> None:
    assert LOG_IN in str(met(error))


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError(
            "Failed to verify credentials with http://h: Failed to execute API request: the service "
            "process is busy and did not respond in time."
        ),
        AuthenticationError("Failed to verify credentials with http://h: returned error 502"),
        CommError("Run initialization has timed out after 20.0 sec"),
        ConnectionError("refused"),
        CommError("POST http://127.0.0.1:40191/graphql giving up after 1 attempt(s)"),
    ],
)
def test_a_server_that_could_not_be_asked_has_refused_nothing(error: Exception) -> None:
    met_ = met(error)
    assert isinstance(met_, TrackerUnavailableError)
    assert LOG_IN not in str(met_)


def test_what_wandb_does_not_take_is_rejected() -> None:
    assert isinstance(met(UsageError("log takes a dictionary")), TrackerRejectedError)


def test_the_message_is_a_sentence_and_not_a_clients_own_text() -> None:
    message = str(met(CommError("Could not find run <Run tester/p/nosuchrun (not found)>")))
    assert message == (
        "W&B has no run tester/p/nosuchrun: name it as entity/project/id, or set WANDB_ENTITY and "
        "WANDB_PROJECT"
    )
    refused = (
        "HTTPConnectionPool(host='127.0.0.1', port=9): Max retries exceeded with url: /graphql (Caused by "
        "NewConnectionError('<urllib3.connection.HTTPConnection object at 0x7f>: Failed to establish a "
        "new connection: [Errno 111] Connection refused'))"
    )
    page = "Failed to get resume status for run m: returned error 404: {<html><body>"
    assert str(met(CommError(page))) == "W&B is not available (it answers 404)"
    error = met(ConnectionError(refused))
    assert str(error) == "W&B at http://127.0.0.1:9 does not answer (connection refused)"
    assert isinstance(error, TrackerUnavailableError)
    assert "object at 0x7f" in error.detail


def test_rows_that_were_given_up_are_known_by_wandbs_log(tmp_path: Path) -> None:
    log = tmp_path / "debug-internal.log"
    assert rows_given_up(log) is None
    log.write_text('{"level":"INFO","msg":"filestream: sending request"}\n')
    assert rows_given_up(log) is None
    log.write_bytes(b"\xff\n" + FATAL.encode() + b"{}\n")
    message = rows_given_up(log)
    assert message is not None
    assert message.startswith("filestream: fatal error")
    assert "401 Unauthorized" in message
