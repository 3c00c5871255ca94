"""No user and no password in what memlog writes down or says."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlog.redact import without_credentials


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
def test_credentials_are_taken_out_of_a_message(url: str) -> None:
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
"""What RFC 3986 allows in a user and a password."""


@given(
    st.sampled_from(["http", "https", "postgresql+psycopg2", "mysql", "s3"]),
    st.text(USERINFO),
    st.text(USERINFO),
    st.sampled_from(["{}", "'{}'", '"{}"', "({})", "can't reach {}: refused", "uri={}", "{},"]),
)
def test_no_password_in_an_address_is_left(
    scheme: str, before: str, after: str, sentence: str
) -> None:
    address = f"{scheme}://anna:{before}s3cret{after}@host:5000/path"
    shown = without_credentials(sentence.format(address))
    assert "s3cret" not in shown
    assert "anna" not in shown
    assert "//host:5000/path" in shown


@given(st.text())
def test_taking_out_twice_is_taking_out_once(text: str) -> None:
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
