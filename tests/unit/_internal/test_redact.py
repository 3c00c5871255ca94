"""Files, logs and messages of memlog contain no user and no password."""

import logging
import string
from collections.abc import Callable
from urllib.parse import quote, unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlog._internal import redact
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import bare_address, remember, without_credentials
from memlog.delivery.helper.process import _WithoutCredentials
from memlog.oom.errors import describe


@pytest.mark.parametrize(
    "url",
    [
        "https://anna:s3cret@tracking:5000/health",
        "https://anna:s3c/r@s3cret@tracking:5000",
        "postgresql://anna:s3cret@host/db",
        "https://anna:it's3cret@tracking:5000",
        'https://anna:"s3cret"@tracking:5000',
    ],
)
def test_credentials_are_removed_from_a_message(url: str) -> None:
    shown = without_credentials(f"API request to {url} failed")
    assert "s3c" not in shown
    assert "anna" not in shown
    assert shown.startswith("API request to ")
    assert shown.endswith(" failed")


@pytest.mark.parametrize(
    "url",
    [
        "http://host/?token=s3cret",
        "postgresql://host/db?user=u&password=s3cret&sslmode=require",
        "https://host/path;api_key=s3cret",
        "https://host/path;pw=s3cret;x=1",
        "https://host/?x=1&code=s3cret",
        "https://host/#access_token=s3cret&x=1",
        "https://host/?password=it's3cret",
        "https://host/?password=a;s3cret",
        "mssql+pyodbc://host/?odbc_connect=UID%3Dsa%3BPWD%3Ds3cret%3BX%3D1",
        "mssql+pyodbc://host/?odbc_connect=PWD%3D%7Ba%3Bs3cret%7D%3BX%3D1",
        "mssql+pyodbc://host/?odbc_connect=UID%253Dsa%253BPWD%253Ds3cret",
    ],
)
def test_secrets_in_a_query_are_taken_out(url: str) -> None:
    shown = without_credentials(f"can't reach {url} now")
    assert "s3cret" not in shown
    assert "//host" in shown


@pytest.mark.parametrize(
    "text",
    [
        "connecting with password=s3cret host=db failed",
        "connecting with password = 's3 s3cret' host=db failed",
        "SERVER=host;PWD=s3cret;X=1",
        "PWD={a b;s3cret};SERVER=host",
        "MLFLOW_TRACKING_TOKEN=s3cret",
        '{"password": "s3cret", "x": 1}',
        "the header is Bearer s3cret",
        "Authorization: Basic s3cret==",
        "{'Authorization': 'Bearer s3cret'}",
    ],
)
def test_secrets_outside_of_addresses_are_taken_out(text: str) -> None:
    assert "s3cret" not in without_credentials(text)


USERINFO = string.ascii_letters + string.digits + "-._~!$&'()*+,;=:%"
"""Characters that RFC 3986 allows in a user and a password."""
SCHEMES = st.sampled_from(["http", "https", "postgresql+psycopg2", "mysql", "s3"])
SENTENCES = st.sampled_from(
    ["{}", "'{}'", '"{}"', "({})", "can't reach {}: refused", "uri={}", "{},"]
)
ANYTHING = st.text() | st.text(f'{USERINFO} \t\n\u00a0/@?#[]\\"\u00e4\U0001f511')
"""Texts of any characters. Characters with a meaning in an address, and blanks, are frequent."""


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_remembered", ())
    monkeypatch.setattr(redact, "_known", None)


@given(SCHEMES, ANYTHING, ANYTHING)
def test_no_password_in_a_whole_address_is_left(scheme: str, before: str, after: str) -> None:
    """Here the whole text is one address."""
    shown = bare_address(f"{scheme}://anna:{before}s3cret{after}@host:5000/a path")
    assert shown == f"{scheme}://host:5000/a path"


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "as Python shows it": repr,
    "as Python shows it in ASCII": ascii,
    "with its blanks as one": lambda text: " ".join(text.split()),
    "escaped": lambda text: quote(text, safe="/:@"),
    "not escaped": unquote,
}


@pytest.mark.usefixtures("nothing_remembered")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(SCHEMES, ANYTHING, ANYTHING, SENTENCES, st.sampled_from(sorted(SPELLINGS)))
def test_no_password_of_a_known_address_is_left_in_a_text(
    scheme: str, before: str, after: str, sentence: str, spelling: str
) -> None:
    address = f"{scheme}://anna:{before}s3cret{after}@host:5000"
    remember(address)
    shown = without_credentials(sentence.format(SPELLINGS[spelling](f"{address}/path")))
    assert "s3cret" not in shown
    assert "anna:" not in shown


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize(
    "text",
    [
        "FATAL: wrong password pa s3cret (SQLSTATE 28P01)",
        "connecting with password=pa s3cret host=db failed",
        "connecting with 'pa\\ts3cret' failed",
        "Max retries exceeded with url: /s3cret@host:5000/api",
        "sent ?api_key=ke s3cret&page=2",
        "http://anna:pa%20s3cret@host/",
        "anna:pa+s3cret@host",
    ],
)
def test_a_remembered_password_is_hidden_without_its_address(text: str) -> None:
    remember("http://anna:pa s3cret@host:5000/?api_key=ke s3cret", "http://me:pw/s3cret@host", None)
    shown = without_credentials(text)
    assert "s3cret" not in shown
    assert shown


@pytest.mark.usefixtures("nothing_remembered")
def test_memory_for_remembered_addresses_is_bounded() -> None:
    remember(*(f"http://anna:pa ss{number}@host" for number in range(1000)))
    remember(f"http://anna:{'@/' * 1000}@host", f"http://anna:{'a b' * 10_000}@host")
    remember("http://anna:the last@host")
    assert without_credentials("x anna:the last@host") == "x host"
    assert len(redact._remembered) == redact._MAX_REMEMBERED


@given(SCHEMES, st.text(USERINFO), st.text(USERINFO), SENTENCES)
def test_no_password_in_an_address_is_left(
    scheme: str, before: str, after: str, sentence: str
) -> None:
    address = f"{scheme}://anna:{before}s3cret{after}@host:5000/path"
    shown = without_credentials(sentence.format(address))
    assert "s3cret" not in shown
    assert "anna" not in shown
    assert "//host:5000/path" in shown


def test_neither_an_error_of_memlogs_nor_a_clients_log_tells_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = OSError("can't reach http://anna:s3cret@host")
    Diagnostics().fault("asking", error)
    assert "http://host" in caplog.text
    assert "s3cret" not in caplog.text
    record = logging.LogRecord(
        "client", logging.ERROR, "", 1, "%s", (error,), (OSError, error, None)
    )
    lines = _WithoutCredentials().format(record)
    assert lines.count("http://host") == 2
    assert "s3cret" not in lines


def test_a_message_is_not_cut_inside_a_password() -> None:
    """Without its @ a password would not be recognised as one."""
    for length in range(250, 310):
        message = f"{'x' * length} http://anna:s3cret@host"
        assert "s3c" not in describe(MemoryError(message), None).message


@given(st.text())
def test_removing_twice_changes_nothing(text: str) -> None:
    once = without_credentials(text)
    assert without_credentials(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "Bearer token is missing",
        "max_tokens=5",
        "password authentication failed for user",
        "http://host/?barcode=5&page=2",
        "sqlite:////home/u@corp/mlflow.db",
        "sqlite:///runs@work/m.db",
        "me@example.org",
        "a/b@c",
    ],
)
def test_what_is_no_password_stays(text: str) -> None:
    assert without_credentials(text) == text
