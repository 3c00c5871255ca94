"""Check, in about two seconds, that a W&B server can be reached."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from memlog_wandb.errors import unavailable

TIMEOUT = 2
"""Maximum seconds to wait for the connection, and for the answer."""
_SERVER_ERROR = 500
_TOO_MANY = 429


def probe(server: str) -> None:
    """Request the server's health page.

    A server error and "too many requests" count as errors. Any other answer counts as success, also "not
    found" and "unauthorized". A server that accepts the connection, but answers too slowly, also counts as
    reached. wandb itself waits longer, so wandb can still deliver to this server.

    Raises:
        TrackerUnavailableError: the server can't be reached, or answers with an error.
    """
    try:
        with urllib.request.urlopen(f"{server.rstrip('/')}/healthz", timeout=TIMEOUT):  # noqa: S310 - the scheme was checked by wandb, which made the address
            return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= _SERVER_ERROR or error.code == _TOO_MANY:
            raise unavailable(f"{server} answers {error.code}") from None
    except urllib.error.URLError as error:
        # A TLS error means that the server was reached. wandb may have other certificates.
        if not isinstance(error.reason, ssl.SSLError):
            raise unavailable(str(error.reason), server) from None
    except TimeoutError:  # the server took the connection: a timeout before that is a URLError
        return
    except (OSError, ValueError) as error:
        raise unavailable(str(error), server) from None
