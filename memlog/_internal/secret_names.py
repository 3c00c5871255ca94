"""Recognition of secrets by the names of options, settings and environment variables, and by their form."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, cast


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern as `re.compile` does, but compile it when it is used first."""
    return cast("re.Pattern[str]", _Pattern(text, flags))


class _Pattern:
    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        # `re` keeps compiled patterns.
        attribute = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, attribute)
        return attribute


_PART = lazy_pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SERVICES = (
    "hf|huggingface|wandb|github|gitlab|openai|anthropic|aws|azure|gcp|google|gemini|slack|docker|comet|neptune|mlflow"
    "|clearml|kaggle|cohere|mistral|groq|replicate|langchain|langsmith|discord|telegram|mattermost|mysql|postgres|redis"
    "|mongo|minio|vault|ldap|smtp|ssh|ftp"
)
_CERTAIN = lazy_pattern(
    r"(?:passw(?:or)?d?|passwrd|passwort|^pword|^psk|passphrase|passcode|keypass|psw|pswd|pwd|secret|credential|apikey|accesskey|secretkey|privatekey|webhook"
    rf"|(?:{_SERVICES}|hub|gh|my|user|db|app|session|service|admin|root)(?:token|pass|pat|pw)"
    rf"|(?:{_SERVICES}|my|app|service)key)s?$"
    r"|^creds?$"
)
_PATH = lazy_pattern(r"[a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)+$")
_TOKEN = lazy_pattern(r"(?:auth|access|bearer|api|bot|id|refresh)?token(?:s|list)?$", re.IGNORECASE)
_COMPOUND = lazy_pattern(r"([a-z]{2,})(?:tokens?|pw)$")
"""A name without separators, such as ``companytoken``. What is before ``token`` may be any service's name."""
_SERVICE = lazy_pattern(rf"(?:{_SERVICES}|hub|gh)$")
_SHORT_FORMS = frozenset({"api", "tok"})
"""Parts after a service's name that may be short for its API key or token, as in ``--wandb-api``."""
_SHORT_FORM = lazy_pattern(r"(?:api|tok)\W*$", re.IGNORECASE)
_OTHER = frozenset(
    {"key", "keys", "auth", "authorization", "pass", "passes", "pw", "pat", "pats", "jwt", "bearer"}
    | {"cookie", "cookies", "signature", "sas", "otp", "oauth", "sessionid"}
)
_KEY_OF_A_SERVICE = frozenset({"api", "access", "secret", "private", "encryption", "signing"})
"""Parts before ``key`` with which the name certainly is that of a secret."""
# Parts before "token" or "key", as in pad_token, max_tokens, image_key and sort_key.
_ORDINARY_BEFORE = frozenset(
    """
    pad padding eos bos unk mask sep cls max min num n nb no total per special start end stop new
    extra additional decoder encoder forced begin drop image img audio video text label labels
    tokens target input output batch sample data column feature features prompt response monitor
    metric dict state json cache partition shuffle group index primary foreign sort value attention
    query row field completion caption name reward obs observation action message messages content
    chosen rejected question answer train eval val test class count vocab public dataset average
    mean prefix suffix visual register context first last forward backward multi single two one
    second hash config loss lr score log skip full used unused all sub soft hard word char byte next
    energy forces stress virials dipole charges polarizability
    prev previous current maxnew minnew keep random summary memory latent action
    """.split()  # noqa: SIM905 - a list of so many strings is hard to read
)
# Parts after a secret's name, as in password_file, secret_name and password_required.
_ORDINARY_AFTER = frozenset(
    """
    file files path paths dir folder name names required policy length len min max type types url
    uri manager store prefix suffix env var size rotation ttl expiry expires count num field prompt
    enabled disabled method mode provider server host port class classes format version scope scopes
    user sock optional check timeout budget limit
    """.split()  # noqa: SIM905 - a list of so many strings is hard to read
)
# Parts after "token", "key" and the like with which the name still is that of a secret.
_SECRET_AFTER = frozenset(
    """
    value values id ids json string str data b raw read write prod production dev staging main admin
    old current default backup header primary secondary secret phrase list lists
    """.split()  # noqa: SIM905 - a list of so many strings is hard to read
)
_NO_SECRET = lazy_pattern(r"(?i:true|false|yes|no|on|off|none|null)?$|[<\[{(]?\W*$|<.*>$|\$")
_NUMBER = lazy_pattern(r"[-+]?[\d._,]*(?:e[-+]?\d+)?[kmbt]?$", re.IGNORECASE)
_SHORT_NUMBER = lazy_pattern(r"\d{1,3}$|\d?\.\d+$")
_TOKEN_ID = lazy_pattern(r"token[-_]?ids?\W*$", re.IGNORECASE)
_HOOK = lazy_pattern(r"(?:^|.*[-_.])hook(?:[-_]?ur[il])?$", re.IGNORECASE)
_OF_DATA = lazy_pattern(r"(?:keys?(?:[-_]?list)?|signature)\W*$", re.IGNORECASE)
"""Names that often are those of columns and metrics, as in ``data.key=text``."""
_NAME = lazy_pattern(r"[a-z]{1,20}(?:[_./,][a-z]{1,20}){0,9}$")
_PLURAL = lazy_pattern(r"(?:s|list)[\"'=]*$", re.IGNORECASE)
_WORDS = lazy_pattern(r"(?:(?:[A-Z]?[a-z]+|[A-Z]+)(?:[-_ ./:](?=[a-zA-Z])|$))+")
_ONE_WORD = lazy_pattern(r"(?:[A-Z]?[a-z]+|[A-Z]+)$")
_OPAQUE = lazy_pattern(r"\d[a-zA-Z]|[a-z]\d?[A-Z]")

_ADDRESSES = frozenset({"url", "urls", "uri", "uris", "address", "endpoint"})
"""Parts after ``webhook``: who knows such an address may post to it."""
CERTAIN, LIKELY = 2, 1


@lru_cache(maxsize=1024)
def secrecy(name: str) -> int:
    """Return `CERTAIN` or `LIKELY` for a name such as ``--api-key`` or ``auth``, and 0 for any other name.

    In a dotted name, such as ``wandb.api_key``, the last part counts, and a group named ``secrets``.
    """
    *groups, last = name.strip("-+/?&\"'").split(".")
    if any(re.fullmatch("(?i)secrets?|credentials?", group) for group in groups):
        return CERTAIN
    parts = [part.lower() for part in _PART.findall(last)]
    levels = [_part_secrecy(parts, index) for index in range(len(parts))]
    return max(levels, default=0)


def _part_secrecy(parts: list[str], index: int) -> int:
    part = parts[index]
    before = parts[index - 1] if index else ""
    after = [later for later in parts[index + 1 :] if not later.isdigit()]
    if _CERTAIN.search(part):
        counted = before in {"num", "n", "max", "min", "total", "no"}
        is_address = part.startswith("webhook") and _ADDRESSES.issuperset(after)
        is_ordinary = not is_address and _ORDINARY_AFTER.intersection(after)
        return 0 if counted or is_ordinary else CERTAIN
    if part in _SHORT_FORMS:
        return LIKELY if _SERVICE.match(before) and not after else 0
    compound = _COMPOUND.match(part)
    is_compound = compound is not None and compound[1] not in _ORDINARY_BEFORE
    if not (is_compound or part in _OTHER or _TOKEN.match(part)):
        return 0
    others = {before, *parts[:index]} & _ORDINARY_BEFORE
    of_data = bool(others - {"no"}) or before == "no" or (part == "passes" and not before)
    if of_data or not _SECRET_AFTER.issuperset(after):
        return 0
    certain = _KEY_OF_A_SERVICE if part in {"key", "keys"} else ()
    return CERTAIN if before in certain or _TOKEN.match(part) else LIKELY


def is_secret_option(name: str, value: str) -> bool:
    """Return True if an option with this name and value holds a secret, such as ``--pat`` or ``--tokens``.

    The number of a plural (``--tokens 512``) and a switch (``--auth true``) are no secrets.
    """
    if _HOOK.match(name) and value.startswith(("https://", "http://")):
        return True
    level = secrecy(name)
    if not level or _NO_SECRET.match(value):
        return False
    if _TOKEN_ID.search(name) and value.isdecimal() and len(value) < _SHORTEST:
        return False
    if level == LIKELY and (
        _SHORT_NUMBER.match(value) or (_OF_DATA.search(name) and _NAME.match(value))
    ):
        return False
    if level == LIKELY and _SHORT_FORM.search(name) and ("/" in value or not is_opaque(value)):
        return False
    is_count = is_plural(name) and _NUMBER.match(value)
    return not (is_count and not _CERTAIN.search(name.lower()))


def is_plural(name: str) -> bool:
    """Return True if an option with this name may have several values."""
    return _PLURAL.search(name) is not None


def is_secret_value(name: str, value: str) -> bool:
    """Return True for a setting in any text, where names such as ``key`` often mean something else."""
    if not is_secret_option(name, value):
        return False
    is_number = _NUMBER.match(value) is not None
    return is_opaque(value) or (
        secrecy(name) == CERTAIN and not (is_number and _TOKEN.search(name))
    )


def is_opaque(value: str) -> bool:
    """Return True for a text of at least 8 characters that no person would choose as a name."""
    is_short = len(value) < _SHORTEST
    return not is_short and not _PATH.match(value) and _OPAQUE.search(value) is not None


_SHORTEST = 8
"""Minimum characters of an environment variable's value that counts as a secret."""


@lru_cache(maxsize=1024)
def is_secret_variable(name: str, value: str) -> bool:
    """Return True if a variable's value is removed from all texts.

    That needs a secret's name, at least 8 characters, and no ordinary content: a word, a number, a path or an
    address. A value with an ordinary content could be a part of many texts.
    """
    level = secrecy(name)
    if not level or name.upper() in {"PWD", "OLDPWD"} or len(value) < _SHORTEST:
        return False
    if _NO_SECRET.match(value) or (_NUMBER.match(value) and len(value) < 2 * _SHORTEST):
        return False
    is_word = len(value) < 2 * _SHORTEST and _ONE_WORD.match(value)
    if is_word or (level != CERTAIN and _WORDS.match(value)):
        return False
    is_path = value[0] in "/~." or value[1:3] in (":\\", ":/")
    if is_path and not re.fullmatch(r"(?=.*\d)(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9+/=]{30,}", value):
        return False
    return "://" not in value or "hook" in name.lower()
