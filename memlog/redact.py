"""Keeping secrets out of files, logs and messages."""

from __future__ import annotations

import re

# Texts may be anybody's: from one place, each pattern tries a bounded part of what follows.
_WORD = re.compile(r"\S+")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://(?!/)")
_NAMES = r"token|pass|pwd|secret|key|sig|auth|credential"
_EQUALS = r"(?:=|%(?:25)*3D)"
# A connection string within an address is percent-encoded, perhaps more than once.
_ENCODED_END = r"%(?:25)*(?:3B|26)"
_BRACED = r"\{[^}]{0,999}\}|%(?:25)*7B(?:(?!%(?:25)*7D)\S){0,199}%(?:25)*7D"
_QUERY = re.compile(
    rf"(?P<name>[?&#][^=&;#\s%]{{0,64}}(?:{_NAMES}|(?<=[?&#])(?:pw|code)(?==))[^=&;#\s%]{{0,64}}=)[^&#\s]*",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?P<name>(?:[;=]|%(?:25)*3[BD]|%(?:25)*26)\s*"
    rf"(?:pw|code|[^=&;#\s%]{{0,64}}(?:{_NAMES})[^=&;#\s%]{{0,64}}){_EQUALS})"
    rf"(?:{_BRACED}|(?:(?!{_ENCODED_END})[^&;#\s])*)",
    re.IGNORECASE,
)
# As in a database's connection string, password='it''s' host=db, and in what clients print.
_SETTING = re.compile(
    r"(?P<name>\b\w{0,64}?(?:passw(?:or)?d|passphrase|pwd|secret|api_?key|access_?key|credentials?|token)"
    r"['\"]?\s*[=:]\s*)(?P<value>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|\{[^}]{0,999}\}"
    r"|(?<=[=])(?!\*{3})\S+|(?<==\s)(?!\*{3})\S+)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<name>\bbearer\s+|\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+)(?!token\b)[^\s'\",]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """``text`` with what looks like a user, a password, a key or a token taken out."""
    text = _WORD.sub(_without_user, text)
    for pattern in (_QUERY, _PART, _SETTING, _HEADER):
        text = pattern.sub(r"\g<name>***", text)
    return text


def _without_user(word: re.Match[str]) -> str:
    """A word without what stands between a scheme and the last @.

    A password may hold a raw "/", "@" or quotation mark. An address that has an @ further on loses more than
    it must, which is the safe side. Where a path follows the scheme at once, as in
    sqlite:////home/me@work/mlflow.db, there is no user.
    """
    text = word[0]
    end = text.rfind("@")
    scheme = _SCHEME.search(text, 0, end + 1) if end >= 0 else None
    return text if scheme is None else text[: scheme.end()] + text[end + 1 :]
