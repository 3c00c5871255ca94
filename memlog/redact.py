"""Keeping secrets out of files, logs and messages."""

from __future__ import annotations

import re

# Up to the last @ of a word: a password may hold a raw "/" or "@". An address that has an @ further on
# loses more than it must, which is the safe side. Where a path follows the scheme at once, as in
# sqlite:////home/me@work/mlflow.db, there is no user.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?!/)[^\s'\"]*@")
_QUERY = re.compile(
    r"(?P<name>[?&;][^=&;\s]*(?:token|pass|pwd|secret|key|sig|auth|credential)[^=&;\s]*=)[^&;#\s'\"]*",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """``text`` with user, password and secret-looking query values taken out of every address in it."""
    return _QUERY.sub(r"\g<name>***", _USERINFO.sub(r"\g<scheme>", text))
