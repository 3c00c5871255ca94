"""Removal of secrets from text for files, logs and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from memlog._internal.patterns import lazy_pattern

# Texts may come from anywhere. From each position a pattern tries a bounded number of characters, so that no
# text takes long to search.
_WORD = lazy_pattern(r"\S+")
_SCHEME = lazy_pattern(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://(?!/)")
_NAMES = r"token|pass|pwd|secret|key|sig|auth|credential"
_EQUALS = r"(?:=|%(?:25)*3D)"
# A connection string inside an address is percent-encoded, perhaps more than once.
_ENCODED_END = r"%(?:25)*(?:3B|26)"
_BRACED = r"\{[^}]{0,999}\}|%(?:25)*7B(?:(?!%(?:25)*7D)\S){0,199}%(?:25)*7D"
_QUERY = lazy_pattern(
    rf"(?P<name>[?&#][^=&;#\s%]{{0,64}}(?:{_NAMES}|(?<=[?&#])(?:pw|code)(?==))[^=&;#\s%]{{0,64}}=)[^&#\s]*",
    re.IGNORECASE,
)
_PART = lazy_pattern(
    r"(?P<name>(?:[;=]|%(?:25)*3[BD]|%(?:25)*26)\s*"
    rf"(?:pw|code|[^=&;#\s%]{{0,64}}(?:{_NAMES})[^=&;#\s%]{{0,64}}){_EQUALS})"
    rf"(?:{_BRACED}|(?:(?!{_ENCODED_END})[^&;#\s])*)",
    re.IGNORECASE,
)
# Secrets in a database's connection string, such as password='it''s' host=db, and in clients' messages.
_SETTING = lazy_pattern(
    r"(?P<name>\b\w{0,64}?(?:passw(?:or)?d|passphrase|pwd|secret|api_?key|access_?key|credentials?|token)"
    r"['\"]?\s*[=:]\s*)(?P<value>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|\{[^}]{0,999}\}"
    r"|(?<=[=])(?!\*{3})\S+|(?<==\s)(?!\*{3})\S+)",
    re.IGNORECASE,
)
_HEADER = lazy_pattern(
    r"(?P<name>\bbearer\s+|\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+)(?!token\b)[^\s'\",]+",
    re.IGNORECASE,
)

# Secrets in a command line, such as --api-key s3cret or wandb.api_key=s3cret.
_SECRET_OPTION = lazy_pattern(
    r"(?:passw(?:or)?d|passphrase|pwd|secret|key|credentials?|token|auth)$", re.IGNORECASE
)

_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
# The patterns end at a blank. In an address with blanks, each blank that \s matches is replaced by a code
# point that Unicode assigns to no character, and put back afterwards.
_SOLID = {
    blank: 0xFDD0 + index
    for index, blank in enumerate((*map(ord, _SPACES), *range(0x2000, 0x200B)))
}
_LOOSE = {solid: blank for blank, solid in _SOLID.items()}

_MAX_ADDRESS = 4096
"""Maximum number of characters of an address that `remember` reads. Longer addresses are ignored."""
_MAX_PATTERNS = 16
"""Maximum number of patterns that match the secrets of one address."""
_MAX_REMEMBERED = 64
"""Maximum number of remembered patterns. New patterns replace the oldest patterns."""
_SHORTEST = 4
"""Minimum number of characters of a secret with blanks. A shorter secret gets no pattern of its own, because
the pattern would match too much ordinary text."""
_KEPT_BY_CLIENTS = ("/:@", "!#$&'()*+,/:;=?@[]~")
"""Characters that URL libraries leave unescaped; one string for each library."""
_ESCAPED = lazy_pattern(r"(?:%[0-9a-fA-F]{2})+")
_ANY_BLANK = r"(?:\s|\+|%[0-9a-fA-F]{2}|\\(?:[tnrvf]|x[0-9a-f]{2}|u[0-9a-f]{4}))+"

_remembered: tuple[str, ...] = ()
"""Patterns of the users and passwords in remembered addresses, the newest last."""
_known: re.Pattern[str] | None = None


def without_credentials(text: str) -> str:
    """Return ``text`` without users, passwords, keys and tokens.

    The function takes the first blank as the end of an address. If a secret in an address contains a blank,
    first call `remember` with the address.
    """
    if _known is not None:
        text = _known.sub(lambda found: "" if found[0].endswith("@") else "***", text)
    text = _WORD.sub(_without_user, text)
    for pattern in (_QUERY, _PART, _SETTING, _HEADER):
        text = pattern.sub(r"\g<name>***", text)
    return text


def shell_line(arguments: Sequence[str]) -> str:
    """Return a command's arguments as a shell takes them, without the values of secret options."""
    import shlex  # noqa: PLC0415 - only the helper process and commands need it

    shown: list[str] = []
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        found = _SECRET_OPTION.search(name) is not None
        if is_secret and not argument.startswith("-"):
            shown.append("***")
            is_secret = False
        elif found and equals:
            shown.append(f"{shlex.quote(name)}=***")
            is_secret = False
        else:
            shown.append(shlex.quote(without_credentials(bare_address(argument))))
            is_secret = found and argument.startswith("-")
    return " ".join(shown).encode("utf-8", "replace").decode()


def bare_address(address: str) -> str:
    """Return ``address`` without user, password and secrets in its query. ``address`` may contain blanks."""
    return without_credentials(address.translate(_SOLID)).translate(_LOOSE)


def remember(*addresses: str | None) -> None:
    """Make `without_credentials` remove the users and passwords of these addresses from every later text.

    Clients print an address in several spellings: escaped, not escaped, or with one blank in place of
    several. If the password contains a "/", some clients print only the part after it.
    """
    global _remembered, _known  # noqa: PLW0603 - replaced when there is a new pattern
    new = [
        found for address in addresses for found in islice(_patterns(address or ""), _MAX_PATTERNS)
    ]
    if not set(new) <= set(_remembered):
        kept = [pattern for pattern in _remembered if pattern not in new]
        _remembered = (*kept, *dict.fromkeys(new))[-_MAX_REMEMBERED:]
        # The longest first: one password may be the beginning of another.
        _known = re.compile("|".join(sorted(_remembered, key=len, reverse=True)))


def _patterns(address: str) -> Iterator[str]:
    """Yield patterns for the user and the password in ``address``, and for other secrets with blanks."""
    scheme = _SCHEME.search(address)
    if scheme is None or len(address) > _MAX_ADDRESS:
        return
    for spelling in _spellings(address[scheme.end() :]):
        yield from _user_patterns(spelling)
        for secret in _settings(spelling):
            yield from _secret_pattern(secret)


def _spellings(rest: str) -> Iterable[str]:
    """Return the spellings of an address (without scheme): unchanged, unescaped, and escaped in two ways."""
    from urllib.parse import quote  # noqa: PLC0415 - needed only with a tracker's address

    plain = _ESCAPED.sub(_unescaped, rest)
    escaped = (quote(plain, safe=kept, errors="surrogatepass") for kept in _KEPT_BY_CLIENTS)
    return dict.fromkeys((rest, plain, *escaped))


def _user_patterns(spelling: str) -> Iterator[str]:
    """Yield patterns of the user and password in an address.

    A password may contain an @, so each @ could be the end of the password. The last @ is tried first.
    """
    for at in reversed([found.start() for found in re.finditer("@", spelling)]):
        user = spelling[:at]
        _, colon, password = user.partition(":")
        if colon:
            yield f"{_spelt(user)}@"
            # A client that splits the address at a "/" in the password prints only the text after it.
            ends = filter(None, re.split("[/?#]", password)[1:])
            yield from (f"(?<=[/?#]){_spelt(end)}@" for end in ends)
        yield from _secret_pattern(password)


def _settings(spelling: str) -> Iterator[str]:
    """Yield the secrets in an address's query, and in a connection string inside the address."""
    for pattern in (_QUERY, _PART):
        for found in pattern.finditer(spelling.translate(_SOLID)):
            yield found[0].removeprefix(found["name"]).translate(_LOOSE)


def _secret_pattern(secret: str) -> Iterator[str]:
    """Yield a pattern if the secret contains blanks and has at least `_SHORTEST` characters.

    Such a secret needs a pattern of its own, because no general pattern finds the secret's end.
    """
    if len(secret) >= _SHORTEST and not _WORD.fullmatch(secret):
        yield _spelt(secret)


def _spelt(text: str) -> str:
    """Return a pattern that matches ``text`` as it is and as Python's ``repr`` shows it."""
    words = []
    for word in re.split(r"\s+", text):
        shown = (word, repr(word)[1:-1], ascii(word)[1:-1], repr(f'"{word}')[2:-1])
        words.append(f"(?:{'|'.join(map(re.escape, dict.fromkeys(shown)))})")
    return _ANY_BLANK.join(words)


def _unescaped(escaped: re.Match[str]) -> str:
    return bytes.fromhex(escaped[0].replace("%", "")).decode(errors="replace")


def _without_user(word: re.Match[str]) -> str:
    """Return a word without the text between a scheme and the last @.

    A password may contain an unescaped "/", "@" or quotation mark. So the last @ counts as the password's
    end. If this @ is in the path, a part of the path is lost, but no secret is kept. An address whose scheme
    is followed by a path, such as sqlite:////home/me@work/mlflow.db, has no user.
    """
    text = word[0]
    end = text.rfind("@")
    scheme = _SCHEME.search(text, 0, end + 1) if end >= 0 else None
    return text if scheme is None else text[: scheme.end()] + text[end + 1 :]
