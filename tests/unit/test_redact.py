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
