"""Asks whether a W&B server is there: that nobody is there shows in about two seconds."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from memlog_wandb.errors import unavailable

TIMEOUT = 2
"""Seconds."""
_SERVER_ERROR = 500
_TOO_MANY = 429


def probe(server: str) -> None:
    """Asks the server for its health page.

    Any answer but an error of the server's own counts as there: not every one has such a page, and
    whether credentials are taken is seen when a run is opened. So does one that is slow to answer, which
    would never get anything otherwise: wandb itself waits longer.

    Raises:
        TrackerUnavailableError: it is not there, or in trouble.
    """
    try:
        with urllib.request.urlopen(f"{server.rstrip('/')}/healthz", timeout=TIMEOUT):  # noqa: S310 - the scheme was checked by wandb, which made the address
            return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= _SERVER_ERROR or error.code == _TOO_MANY:
            raise unavailable(f"{server} answers {error.code}") from None
    except urllib.error.URLError as error:
        if not isinstance(
            error.reason, ssl.SSLError
        ):  # there it is; wandb has certificates of its own
            raise unavailable(str(error.reason), server) from None
    except TimeoutError:  # it has taken the connection: while one is made it would be a URLError
        return
    except (OSError, ValueError) as error:
        raise unavailable(str(error), server) from None
