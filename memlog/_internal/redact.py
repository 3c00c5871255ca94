"""Removal of secrets from text for files, logs and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from memlog._internal.secret_names import (
    is_opaque,
    is_plural,
    is_secret_option,
    is_secret_value,
    is_secret_variable,
    lazy_pattern,
    secrecy,
)

# Texts may come from anywhere. From each position a pattern tries a bounded number of characters, so that no
# text takes long to search.
_WORD = lazy_pattern(r"\S+")
_SCHEME = lazy_pattern(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://(?!/)")
_NAMES = r"token|pass|pwd|secret|key|sig|auth|credential|jwt|bearer"
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
# Settings such as password='it''s' host=db, {api_key:…} and login(key=…). The name decides.
_SETTING = lazy_pattern(
    r"(?P<name>(?<![\w.-])[\w.-]{1,99})(?P<quote>\\{0,3}['\"]?\]?)\s{0,9}(?P<sign>[=:])(?P<blank>\s{0,9})"
)
_VALUE = lazy_pattern(
    r"\\{1,3}['\"][^'\"\\]{0,9999}\\{1,3}['\"]|'(?:[^'\\]|\\.|''){0,9999}'|\"(?:[^\"\\]|\\.){0,9999}\"|\{[^}]{0,999}\}|\([^)]{0,999}\)"
    r"|\[[^\]]{0,9999}\]|(?P<bare>(?<!=)(?<!=\s)[^\s,;})\]'\"]{1,256}|(?<=[=\s])\S{1,256})"
)
_MORE = lazy_pattern(r"[^\s,;})\]'\"]*")
_SAID = lazy_pattern(
    r"(?P<name>\b(?:\w{0,64}(?:passw(?:or)?d|passphrase|secret|token|_key)|api[ _-]?key)s?(?:\s+is)?\s+"
    r"['\"]?)"
    r"(?P<value>[^\s'\",;)]{8,})",
    re.IGNORECASE,
)
_HEADER = lazy_pattern(
    r"(?P<name>\bbearer:?\s+|\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+)"
    r"(?!token\b)[^\s'\",]+|(?P<login>\blogin\(\s{0,9}['\"])(?=[\w-]{0,99}\d)[\w-]{16,}|(?P<cookie>\b(?:set-)?cookie['\"]?\s{0,9}:\s{0,9}['\"]?)[^'\"\r\n]+",
    re.IGNORECASE,
)
_USER = lazy_pattern(r"(?<![\w/@.-])[\w.+-]{1,64}:[^\s@/:'\"]{4,256}@(?!sha\d)(?=[a-zA-Z0-9])")
# The forms of tokens of well-known services, as these write them, and of services for machine learning. Where
# a name could begin in the same way, such as `hf_Llama3_8B_lora`, a token has 10 letters and digits in a row:
# a digit, a lower-case and an upper-case letter are among them, or there are 24.
_RUN = r"[A-Za-z0-9]{0,99}"
_MIXED = (
    rf"(?=[A-Za-z0-9]{{10}})(?:(?={_RUN}\d)(?={_RUN}[a-z])(?={_RUN}[A-Z])|(?=[A-Za-z0-9]{{24}}))"
)
_TOKEN = lazy_pattern(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}"
    rf"|gh[pousr]_{_MIXED}\w{{10,}}|github_pat_\w{{10,}}"
    r"|(?:glpat|gldt|glft|glrt|glcbt|glptt)-[\w-]{20,}"
    rf"|(?:gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent)|GR1348941)-?{_MIXED}[\w-]{{10,}}"
    rf"|(?:hf|api_org|r8|gsk|wandb_v1|tvly|pcsk|lsv2_[ps][kt]|dckr_pat|jina|fw|lin_api|KGAT|e2b)[_-]"
    rf"{_MIXED}[A-Za-z0-9_]{{10,}}"
    rf"|(?:sk|pk|rk|nvapi|sq0csp|pplx|key|xai|csk|pa)-{_MIXED}[\w-]{{10,}}"
    r"|(?:nvapi|pa)-(?=[\w-]{0,99}\d)[\w-]{40,}|(?:dckr_pat|pcsk|wandb_v1)_(?=[\w-]{0,99}\d)[\w-]{27,}"
    r"|[sp]k-lf-[0-9a-f-]{36}|GOCSPX-[\w-]{20,}|glsa_\w{20,}|ntn_[A-Za-z0-9]{30,}"
    r"|hvs\.[\w-]{20,}|tskey-[\w-]{20,}"
    r"|[srp]k_(?:live|test)_\w{10,}|sk-(?:ant|proj|or)-[\w-]{10,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{20,}"
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}|dapi[0-9a-f]{32}(?:-\d)?|dop_v1_[0-9a-f]{64}"
    r"|(?:AC|SK)[0-9a-f]{32}|\d{8,10}:AA[\w-]{33}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?|eyJ[A-Za-z0-9+/]{40,}={0,2}"
    r")"
)
_WEBHOOK = lazy_pattern(
    r"(?P<name>https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)/"
    r"|(?:\w{1,20}\.)?discord(?:app)?\.com/api/webhooks/|(?:[\w-]{1,99}\.){0,9}(?:webhook\.office\.com/\w{1,20}|office(?:365)?\.com/webhook\w{0,9})/"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v\d/hook/"
    r"|maker\.ifttt\.com/[\w/-]{1,199}/with/key/"
    r"|api\.telegram\.org/bot|hooks\.zapier\.com/hooks/|[\w.-]{1,99}\.logic\.azure\.com/))[^\s'\",)]+"
)
# Mattermost, Rocket.Chat, n8n and others run on any host.
_HOOK = lazy_pattern(
    r"(?P<name>https?://(?!(?:github|gitlab)\.com/|huggingface\.co/)(?:(?:web)?hooks?\.[^\s/'\"]{1,199}|[^\s/'\"]{1,199}(?:/[\w.-]{1,99}){0,4}/(?:web)?hooks?(?:-test)?)/)"
    r"(?P<value>(?=[^\s'\",)]{0,99}\d)[^\s'\",)]+)"
)
_PRIVATE_KEY = lazy_pattern(
    r"(?P<name>-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----).*?"
    r"(?P<end>-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)

_LOGIN = lazy_pattern(r"(?:-[uU]|--?(?:[\w-]{0,30}[-_])?(?:user|username|login))$")
_ASSIGNED = lazy_pattern(
    r"(?P<name>[-+/~]{0,2}[\w./@-]{1,99})(?P<sign>[=:])(?P<value>.*)", re.DOTALL
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
        text = _known.sub(lambda match: "" if match[0].endswith("@") else "***", text)
    of_environment = _environment_secrets()
    if of_environment:
        text = _environment_pattern(of_environment).sub("***", text)
    text = _PRIVATE_KEY.sub(r"\g<name>***\g<end>", text)
    text = _WEBHOOK.sub(r"\g<name>***", text)
    text = _HOOK.sub(_without_opaque, text)
    text = _WORD.sub(_without_user, text)
    text = _USER.sub("***@", text)
    for pattern in (_QUERY, _PART):
        text = pattern.sub(r"\g<name>***", text)
    text = _TOKEN.sub("***", text)
    text = _HEADER.sub(
        lambda match: f"{match['name'] or match['login'] or match['cookie']}***", text
    )
    text = _without_settings(text, _is_value_in_text)
    return _SAID.sub(_without_opaque, text)


def shell_line(arguments: Sequence[str]) -> str:
    """Return a command's arguments as a shell takes them, without secrets.

    The value of an option that is named like a secret is left out, whatever it is. All other arguments are
    treated as any text.
    """
    import shlex  # noqa: PLC0415 - only the helper process and commands need it

    shown: list[str] = []
    option = ""
    for argument in arguments:
        is_value = _is_value(option, argument)
        if is_value and _LOGIN.match(option):
            shown.append(f"{shlex.quote(argument.partition(':')[0])}:***")
        else:
            shown.append("***" if is_value else _shown_argument(argument))
        # An option in the plural may have several values.
        if not (is_value and is_plural(option)):
            option = argument
    return " ".join(shown).encode("utf-8", "replace").decode()


def _is_value(option: str, argument: str) -> bool:
    """Return True if ``argument`` is the secret that belongs to the argument before it."""
    option = option.removesuffix("=")
    if "=" in option or (argument.startswith("--") and not _PRIVATE_KEY.match(argument)):
        return False
    if _LOGIN.match(option):
        return re.fullmatch(r"[^\s:/\\]{1,99}:(?!\d{0,5}$)[^\s:/\\].{3,}", argument) is not None
    if argument.startswith("-") and not is_opaque(argument):
        return False
    if option.startswith("-"):
        return is_secret_option(option, argument)
    # A pair without dashes, such as `OPENAI_KEY …`. A word behind `token` or `MODEL.TOKEN` can be a command.
    if re.fullmatch(r"[\w.-]{1,99}", option) is None or not is_secret_option(option, argument):
        return False
    return is_opaque(argument) or (option.isupper() and "." not in option)


def _shown_argument(argument: str) -> str:
    import shlex  # noqa: PLC0415 - see shell_line

    if (
        argument[:2] in ("-u", "-U")
        and _is_value(argument[:2], argument[2:])
        and is_opaque(argument.partition(":")[2])
    ):
        return f"{shlex.quote(argument.partition(':')[0])}:***"
    assigned = _ASSIGNED.fullmatch(argument)
    if assigned is not None:
        name, value = assigned["name"], assigned["value"]
        if _has_secret(name, value) if _is_list(value) else is_secret_option(name, value.strip()):
            return f"{shlex.quote(name)}{assigned['sign']}***"
        if assigned["sign"] == "=" and _LOGIN.match(name) and _is_value(name, value):
            return f"{shlex.quote(name)}={shlex.quote(value.partition(':')[0])}:***"
    # In a list of settings, such as logger={api_key:…}, a name is enough.
    bare = _without_settings(argument, _is_option)
    return shlex.quote(without_credentials(bare_address(bare)))


def _without_settings(text: str, is_secret: Callable[[str, str], bool]) -> str:
    """Return ``text`` without the values of settings for which ``is_secret(name, value)`` is true."""
    shown, kept = [], 0
    setting = _SETTING.search(text)
    while setting is not None:
        end = setting.end()
        value = _VALUE.match(text, end) if secrecy(setting["name"]) else None
        if value is not None and not value[0].startswith("***") and is_secret(setting[0], value[0]):
            shown += [text[kept:end], "***"]
            more = _MORE.match(text, value.end()) if value["bare"] else None
            kept = end = value.end() if more is None else more.end()
        setting = _SETTING.search(text, end)
    return "".join([*shown, text[kept:]])


def _is_list(value: str) -> bool:
    return value.startswith("[") and value.endswith("]")


def _has_secret(name: str, values: str) -> bool:
    """Return True if a list, such as that in ``"tokens": ["…", "…"]``, has a secret."""
    items = (item.strip() for item in values[1:-1].split(","))
    return any(is_secret_value(_name_of(name), _unquoted(item)) for item in items)


def _is_option(name: str, value: str) -> bool:
    if _is_list(value):
        return _has_secret(name, value)
    return is_secret_option(_name_of(name), _unquoted(value))


def _is_value_in_text(name: str, value: str) -> bool:
    if _is_list(value):
        return _has_secret(name, value)
    plain = _unquoted(value)
    is_told = name.rstrip().endswith(":") and plain == value and not is_opaque(value)
    if is_told and (value.isalpha() or not value.isalnum()):
        return False  # In a message, a word after a colon is often an explanation.
    return is_secret_value(_name_of(name), plain)


def _name_of(setting: str) -> str:
    return setting.rstrip().rstrip("=:").rstrip().strip("'\"\\]")


def _without_opaque(found: re.Match[str]) -> str:
    return f"{found['name']}***" if is_opaque(found["value"]) else found[0]


def _unquoted(value: str) -> str:
    value = value.strip("\\")
    if value[-2:-1] == "\\" and value[:1] in "'\"":  # a JSON text inside another one
        value = value[:1] + value[1:-1].rstrip("\\") + value[-1]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _environment_secrets() -> tuple[str, ...]:
    """Return the values of this process's environment variables that are named like secrets."""
    return tuple(
        part
        for name, value in os.environ.items()
        if len(value) <= _MAX_ADDRESS and secrecy(name)
        for part in dict.fromkeys((value, *value.split(",")))
        if is_secret_variable(name, part)
    )


@lru_cache(maxsize=4)
def _environment_pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    from urllib.parse import quote  # noqa: PLC0415 - needed only with secrets

    spelt = {
        _spelt(spelling) for secret in secrets for spelling in (secret, quote(secret, safe=""))
    }
    return re.compile("|".join(sorted(spelt, key=len, reverse=True)))


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
        spelt for address in addresses for spelt in islice(_patterns(address or ""), _MAX_PATTERNS)
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
    for at in reversed([match.start() for match in re.finditer("@", spelling)]):
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
        for match in pattern.finditer(spelling.translate(_SOLID)):
            yield match[0].removeprefix(match["name"]).translate(_LOOSE)


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
