"""No user and no password in what memlog writes down or says."""

import pytest

from memlog.redact import without_credentials


@pytest.mark.parametrize(
    "url",
    [
        "https://anna:s3cret@tracking:5000/health",
        "https://anna:s3c/r@s3cret@tracking:5000",
        "postgresql://anna:s3cret@host/db",
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
    ],
)
def test_secrets_in_a_query_are_taken_out(url: str) -> None:
    shown = without_credentials(f"can't reach {url} now")
    assert "s3cret" not in shown
    assert "//host" in shown


@pytest.mark.parametrize(
    "text",
    ["sqlite:////home/u@corp/mlflow.db", "sqlite:///runs@work/m.db", "me@example.org", "a/b@c"],
)
def test_what_is_no_password_stays(text: str) -> None:
    assert without_credentials(text) == text
