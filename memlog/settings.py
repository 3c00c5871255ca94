"""Settings of a session, combined from several sources.

From the highest priority to the lowest: ``init``'s arguments, its ``config``, the options of ``memlog run``,
the environment, the defaults. No other module reads these environment variables:

* ``MEMLOG_DIR``: folder for runs (default ``./memlog_runs``);
* ``MEMLOG_BACKEND``: backends, separated by commas, used if ``init`` names none;
* ``MEMLOG_ENABLED``: ``0`` switches monitoring off, even if ``init`` switches it on;
* ``MEMLOG_ALERT_WEBHOOK``: address to which alerts are posted, if ``init`` names none. The address is a
  credential, so it is no part of `Settings`, which may be written to a file.

``memlog run`` passes its options to the child process in a variable of its own
(`memlog._internal.current_session`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from memlog._internal.current_session import defaults as launcher_options
from memlog.errors import ConfigurationError

DEFAULT_DIRECTORY = Path("memlog_runs")

_MONITOR_KEYS = {
    "enable_memory_monitoring": "enabled",
    "memory_monitor_batches": "verbose_batches",
}
"""Configuration keys of the monitors that memlog replaces, and memlog's own names for them."""

_OWN_SECTION = "memlog"
_SECTIONS = (_OWN_SECTION, "trainer_params")
"""Sections of a larger configuration that may contain memlog's keys."""

WEBHOOK, WEBHOOK_KEY = "MEMLOG_ALERT_WEBHOOK", "MEMLOG_ALERT_WEBHOOK_KEY"
"""Variables with the webhook's address, and the key with which requests to it are signed."""
_NOT_DESCRIBED = {"directory", "backends", "project", "name", "quiet", "alert_webhook"}
"""Settings that `Settings.described` leaves out.

The run's first event has fields for some of them. The others do not change the recorded data.
"""
_SHORTEST_INTERVAL = 0.05
_SMALLEST_SEGMENT = 4096
_SMALLEST_LIMIT = 1024**2
LONGEST_NAME = 1000
"""Maximum characters of a run's or project's name."""
_MAX_RULES_LENGTH = 20_000
"""Maximum characters of all alert rules together."""
_NAMES = f"text of at most {LONGEST_NAME:,} valid Unicode characters"
_RULES = f"rules of at most {_MAX_RULES_LENGTH:,} valid Unicode characters in all"
_SHOWN = 100
_ADDRESS = re.compile(r"https?://[^\s/@]+(?:/[!-~]*)?")
LONGEST_WAIT = 1e6
"""Maximum value, in seconds, of a setting for a waiting time: about twelve days."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one session.

    Attributes:
        backends: Names of the backends to deliver to; empty: join the runs that the user opens.
        project: The tracker's project or experiment; ``None``: the tracker's own default.
        name: The run's name; ``None``: the tracker chooses one.
        every: Number of steps from one batch event to the next; 1 publishes an event at each step.
        alerts: Rules as text; `memlog.alerts.rules` parses them.
        alert_webhook: True if alerts are posted to a webhook. In ``config``, the webhook's address.
        directory: Folder that contains the runs' folders.
        enabled: If ``False``, memlog installs nothing and records nothing.
        initial_step: Number of the first step, for resumed training.
        layers: True to trace a step from time to time, layer by layer.
        budget: Fraction of training time that tracing may take, above 0 and up to 1.
        verbose_batches: Number of the run's first batches for which a line is printed.
        quiet: True to print no line about the run itself; ``"end"``: only one, when the run ends. Alerts,
            findings and problems are still printed.
        bind_grace: Seconds, from the first step, in which the user can open a run for a named backend. After
            this time, memlog opens a run of its own.
        finish_timeout: Maximum seconds that ``finish`` waits for delivery.
        linger: Seconds that the helper process continues to try to deliver after training has ended.
        sample_interval: Seconds between readings of the process tree.
        segment_bytes: Bytes at which the journal closes a file (a segment) and starts the next one. A value
            above an eighth of ``journal_limit`` counts as an eighth of ``journal_limit``.
        journal_limit: Maximum bytes of a run's journal. Above this limit, memlog removes frequent events:
            first events that every tracker has received, then the oldest undelivered events. memlog keeps
            every peak and every alert, and never changes the newest file of a process.
    """

    backends: tuple[str, ...] = ()
    project: str | None = None
    name: str | None = None
    every: int = 1
    alerts: tuple[str, ...] = ()
    alert_webhook: bool = False
    directory: str = str(DEFAULT_DIRECTORY)
    enabled: bool = True
    initial_step: int = 0
    layers: bool = False
    budget: float = 0.01
    verbose_batches: int = 0
    quiet: bool | Literal["end"] = False
    bind_grace: float = 5.0
    finish_timeout: float = 10.0
    linger: float = 120.0
    sample_interval: float = 1.0
    segment_bytes: int = 16 * 1024**2
    journal_limit: int = 2 * 1024**3

    def __post_init__(self) -> None:
        """Check the ranges. Types were checked when the settings were built."""
        self._require_texts()
        self._require("every", self.every >= 1, "a whole number from 1 up")
        self._require("initial_step", self.initial_step >= 0, "0 or more")
        self._require("verbose_batches", self.verbose_batches >= 0, "0 or more")
        self._require("budget", 0 < self.budget <= 1, "a share of training time, such as 0.01")
        self._require(
            "sample_interval", self.sample_interval >= _SHORTEST_INTERVAL, "at least 0.05 s"
        )
        self._require(
            "segment_bytes", self.segment_bytes >= _SMALLEST_SEGMENT, "at least 4096 bytes"
        )
        self._require(
            "journal_limit", self.journal_limit >= _SMALLEST_LIMIT, "at least 1048576 bytes"
        )
        for field in ("bind_grace", "finish_timeout", "linger"):
            self._require(
                field, 0 <= getattr(self, field) <= LONGEST_WAIT, "a number of seconds, 0 or more"
            )

    def _require_texts(self) -> None:
        """Check names and alert rules. They must fit into one message to the helper process."""
        for field in ("name", "project"):
            text = getattr(self, field) or ""
            self._require(field, len(text) <= LONGEST_NAME and _is_unicode(text), _NAMES)
        rules = "".join(self.alerts)
        self._require("alerts", len(rules) <= _MAX_RULES_LENGTH and _is_unicode(rules), _RULES)

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigurationError(f"{field}={_shown(getattr(self, field))}: pass {wanted}")

    @property
    def segment_size(self) -> int:
        """Bytes at which a segment is full: at most an eighth of ``journal_limit``.

        memlog can make only closed segments smaller. So the open segment must stay small.
        """
        return max(min(self.segment_bytes, self.journal_limit // 8), _SMALLEST_SEGMENT)

    def described(self) -> dict[str, str]:
        """Return settings as text for trackers: ``every``, and all settings that differ from their defaults.

        Settings in `_NOT_DESCRIBED` are left out.
        """
        defaults = msgspec.structs.asdict(Settings())
        return {
            name: ", ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in msgspec.structs.asdict(self).items()
            if name == "every" or (value != defaults[name] and name not in _NOT_DESCRIBED)
        }


def runs_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder for runs: ``directory``, else ``$MEMLOG_DIR``, else ``./memlog_runs``.

    Raises:
        ConfigurationError: The path is no valid UTF-8, or it is relative and the working directory no longer
            exists.
    """
    named = Path(directory or os.environ.get("MEMLOG_DIR") or DEFAULT_DIRECTORY)
    remedy = "pass dir=… or set MEMLOG_DIR to"
    try:
        path = named.absolute()
    except OSError as error:
        raise ConfigurationError(
            f"the folder {_shown(str(named))} is relative, and the working directory no longer exists: "
            f"{remedy} an absolute path"
        ) from error
    if not _is_unicode(str(path)):
        raise ConfigurationError(f"dir={_shown(str(path))}: {remedy} a path that is valid UTF-8")
    return path


def resolve(arguments: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Settings:
    """Build the settings from ``init``'s arguments and its ``config``.

    Args:
        arguments: Arguments of ``init`` by the names of `Settings`; the value ``None`` means not passed.
        config: Mapping with memlog's own keys or the keys in `_MONITOR_KEYS`. The keys are at the top level,
            or in a section named ``memlog`` or ``trainer_params``. Other keys are ignored.

    Raises:
        ConfigurationError: A value has the wrong type or is out of range. Or a key in the section ``memlog``
            is unknown. Or a key outside this section is a misspelling of a key in `_MONITOR_KEYS`.
    """
    launcher = launcher_options()
    values = {**launcher, **_from_config(config or {}), **_without_none(arguments)}
    values["directory"] = _directory(values.get("directory"))
    if "alerts" in values:
        values["alerts"] = _rules(values["alerts"])
    values["alert_webhook"] = _take_webhook(values.get("alert_webhook"))
    if not values.get("backends"):
        values["backends"] = launcher.get("backends", environment_backends())
    if not enabled_by_environment():
        values["enabled"] = False
    try:
        settings = msgspec.convert(values, Settings)
        # Two uploaders with the same name would block each other.
        return msgspec.structs.replace(settings, backends=tuple(dict.fromkeys(settings.backends)))
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None  # memlog's own error, which msgspec wrapped
        raise ConfigurationError(f"a setting has the wrong type: {error}") from error


_webhook: str | None = None


def webhook_address() -> str | None:
    """Return the address to which alerts are posted: that of the last `resolve`, or the environment's."""
    return _webhook or os.environ.get(WEBHOOK) or None


def _take_webhook(given: Any) -> bool:
    """Keep the webhook's address in memory; return whether there is one."""
    global _webhook  # noqa: PLW0603 - in memory only, and no part of the settings
    _webhook = None
    address = given or os.environ.get(WEBHOOK)
    if not address:
        return False
    if not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
        # The message leaves out the address, because whoever knows it can post to it.
        raise ConfigurationError(
            f"alert_webhook (or {WEBHOOK}) is no address: pass that of a webhook, such as "
            "https://example.com/hook"
        )
    _webhook = address
    return True


def environment_backends() -> tuple[str, ...]:
    """Return the backends that ``$MEMLOG_BACKEND`` names."""
    return tuple(_split(os.environ.get("MEMLOG_BACKEND", "")))


def enabled_by_environment() -> bool:
    """Return False if ``$MEMLOG_ENABLED`` switches monitoring off."""
    return os.environ.get("MEMLOG_ENABLED", "").lower() not in ("0", "false", "no", "off")


def _directory(given: Any) -> str:
    try:
        return str(runs_directory(given))
    except TypeError as error:
        raise ConfigurationError(f"dir={given!r}: pass the path of a folder") from error


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"config is a {type(config).__name__}: pass a plain mapping, such as "
            "{'enable_memory_monitoring': True} (OmegaConf: OmegaConf.to_container(cfg))"
        )
    values: dict[str, Any] = {}
    for name, section in (("", config), *((n, config[n]) for n in _SECTIONS if n in config)):
        if isinstance(section, Mapping):
            values.update(_known(section, strict=name == _OWN_SECTION))
        elif name == _OWN_SECTION:
            raise ConfigurationError(f"config section 'memlog' is {section!r}: pass a mapping")
    return values


def _known(section: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return memlog's settings from one section of the configuration, under memlog's own names.

    In memlog's own section an unknown key is an error. In other sections only a misspelling of one of
    `_MONITOR_KEYS` is an error.
    """
    names = {**_MONITOR_KEYS, "backend": "backends", "dir": "directory"}
    names.update({field: field for field in Settings.__struct_fields__})
    known = {}
    for key, value in section.items():
        if key in names:
            known[names[key]] = _as_tuple(value) if names[key] in ("backends", "alerts") else value
        elif key not in _SECTIONS:
            _refuse_misspelling(str(key), names if strict else _MONITOR_KEYS, strict=strict)
    return _without_none(known)


def _refuse_misspelling(key: str, known: Iterable[str], *, strict: bool) -> None:
    import difflib  # noqa: PLC0415 - needed only for this message

    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6 if strict else 0.9)
    if close:
        raise ConfigurationError(f"config key {key!r} is not known: did you mean {close[0]!r}?")
    if strict:
        raise ConfigurationError(
            f"config key {key!r} is not known in section 'memlog': known keys are {', '.join(sorted(known))}"
        )


def _rules(value: Any) -> Any:
    """Return alert rules as a tuple.

    In YAML, ``error: host.rss > 80%`` without quotes is a mapping. A mapping raises an error.
    """
    rules = (value,) if isinstance(value, Mapping) else _as_tuple(value)
    for rule in rules if isinstance(rules, tuple) else ():
        if isinstance(rule, Mapping):
            level, text = next(iter(rule.items()), ("", ""))
            raise ConfigurationError(
                f"an alert rule was read as the mapping {dict(rule)!r}: put quotes around it, "
                f'"{level}: {text}", or write `{text} as {level}`'
            )
    return rules


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(_split(value))
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _is_unicode(text: str) -> bool:
    """Return False if the text can't be written as UTF-8, such as a path with undecodable bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
