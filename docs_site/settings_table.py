"""The table of all settings of ``memlog.init``, from its docstring and from `memlog.settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import click
import griffe

from memlog.cli.run import run
from memlog.settings import Settings

_CONFIG_NAMES = {
    "backend": "backend",
    "dir": "dir",
    "model": None,
    "on_alert": None,
    "config": None,
}
"""Key in a configuration, by argument; ``None`` if there is no key. Other keys are the arguments' names."""
_FIELDS = {"backend": "backends", "dir": "directory"}
_OLD_KEYS = {"enabled": "enable_memory_monitoring", "verbose_batches": "memory_monitor_batches"}
_ENVIRONMENT = {
    "backend": "MEMLOG_BACKEND",
    "dir": "MEMLOG_DIR",
    "enabled": "MEMLOG_ENABLED",
    "alert_webhook": "MEMLOG_ALERT_WEBHOOK",
}


class Setting(NamedTuple):
    """A row of the table."""

    name: str
    default: str
    meaning: str
    is_argument: bool


def settings(package: griffe.Module) -> list[Setting]:
    """Return the arguments of ``init``, and then the settings that only a configuration can name.

    Args:
        package: The loaded package memlog.
    """
    init = package["session.session.init"]
    rows = [
        Setting(name, str(init.parameters[name].default), meaning, is_argument=True)
        for name, meaning in _described(init, "parameters")
    ]
    named = {_FIELDS.get(row.name, row.name) for row in rows}
    defaults = Settings()
    rows += [
        Setting(name, _number(getattr(defaults, name)), meaning, is_argument=False)
        for name, meaning in _described(package["settings.Settings"], "attributes")
        if name not in named
    ]
    return rows


def table(package: griffe.Module) -> str:
    """Return the table in Markdown."""
    lines = ["| setting | default | also set by | meaning |", "| --- | --- | --- | --- |"]
    for row in settings(package):
        meaning = " ".join(row.meaning.split()).replace("|", "\\|")
        places = "<br>".join(_places(row))
        lines.append(f"| `{row.name}` | `{row.default}` | {places} | {meaning} |")
    return "\n".join(lines)


def _places(row: Setting) -> Iterator[str]:
    key = _CONFIG_NAMES.get(row.name, row.name)
    if key is not None:
        yield f"config `{key}`" if row.is_argument else f"config `{key}` only"
    if row.name in _OLD_KEYS:
        yield f"config `{_OLD_KEYS[row.name]}`"
    for option in run.params:
        if isinstance(option, click.Option) and option.name == _FIELDS.get(row.name, row.name):
            yield f"`memlog run {option.opts[0]}`"
    if row.name in _ENVIRONMENT:
        yield f"`{_ENVIRONMENT[row.name]}`"


def _described(thing: griffe.Object, section: str) -> Iterator[tuple[str, str]]:
    """Return name and description of each entry of a section of a docstring."""
    assert thing.docstring is not None, thing.path  # noqa: S101 - ruff demands one
    for found in thing.docstring.parse("google"):
        if found.kind.value == section:
            yield from ((entry.name, entry.description) for entry in found.value)


def _number(value: object) -> str:
    """Return a default as Python prints it; whole numbers get thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
