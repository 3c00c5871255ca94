"""Keeping secrets out of files, logs and messages."""

from __future__ import annotations

import re

# Up to the last @ of a word: a password may hold a raw "/" or "@". An address that has an @ further on
# loses more than it must, which is the safe side.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s'\"]*@")


def without_credentials(text: str) -> str:
    """``text`` with the user and password taken out of every address in it."""
    return _USERINFO.sub(r"\g<scheme>", text)
