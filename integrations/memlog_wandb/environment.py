"""Environment variables that W&B's client reads. memlog adapts them for its helper process."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlog._internal.connections import CredentialScope, secret_names
from memlog.sink import ClientVariables, Connection
from memlog_wandb.addresses import server_of

BASE_URL = "WANDB_BASE_URL"
API_KEY = "WANDB_API_KEY"
DIR = "WANDB_DIR"
PROGRAM = "WANDB_PROGRAM"

CONFIG_DIR = "WANDB_CONFIG_DIR"
DEFAULT_SERVER = "https://api.wandb.ai"

_PREFIX = "WANDB_"

_NEVER = (
    "WANDB_SERVICE",  # the user's own connection to wandb's process: it ends with the user's process
    "WANDB_RUN_ID",  # the user's run, which only the user's process writes to
    "WANDB_RESUME",
    "WANDB_SWEEP_ID",  # memlog's run would count as a run of the sweep
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_CONFIG_PATHS",
    "WANDB_RUN_DIR",
)

_ALWAYS = {
    # The user did not start this process, so it prints nothing. It saves no code and no patches, because they
    # would be memlog's.
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    # No error reports: if the server can't be reached, they would delay the process's end by 10 s.
    "WANDB_ERROR_REPORTING": "false",
}
_VARIABLES = ClientVariables((_PREFIX,), frozenset({"NETRC"}), never=_NEVER, always=_ALWAYS)


def gathered(settings: Any = None) -> dict[str, str]:
    """Return the environment variables of this process that W&B's client needs in the helper.

    Args:
        settings: Settings of the user's open run, which override the environment; ``None``: no run is open.
    """
    found = _VARIABLES.gathered()
    for name, attribute in ((BASE_URL, "base_url"), (API_KEY, "api_key")):
        if value := getattr(settings, attribute, None):
            found[name] = str(value)
    # A relative path is relative to this process's working directory. The helper's may be another one.
    found[DIR] = str(Path(found.get(DIR, ".")).absolute())
    if sys.argv and sys.argv[0]:
        found.setdefault(PROGRAM, sys.argv[0])  # otherwise W&B would show the helper's program
    return found


def home() -> CredentialScope:
    """Return the server's address, and the names of variables and files with credentials.

    The environment overrides wandb's settings files. If neither names a server,
    the address is that of W&B's default server.
    """
    found = {name: text for name, text in gathered().items() if name.startswith(_PREFIX)}
    server, credentials = DEFAULT_SERVER, list(secret_names(found))
    for file in _settings_files(found):
        written = _written(file)
        server = written.get("base_url", server)
        if any(name in written for name in ("api_key", "identity_token_file")):
            credentials.append(str(file))
    return CredentialScope(found.get(BASE_URL, server), tuple(credentials))


def _settings_files(found: Mapping[str, str]) -> list[Path]:
    """Return the files from which wandb reads its settings. A later file overrides an earlier one."""
    everywhere = Path(found.get(CONFIG_DIR, "~/.config/wandb")).expanduser()
    here = Path(found[DIR]).expanduser()
    return [everywhere / "settings", *(here / name / "settings" for name in ("wandb", ".wandb"))]


def _written(file: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
        return dict(parser["default"])
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError):
        return {}


def apply(connection: Connection) -> None:
    """Set the environment variables of W&B's client. Limit the size and duration of servers' answers.

    Call this function only in a process of memlog's own, before the import of wandb.
    """
    from memlog._internal.connections import bound_answers  # noqa: PLC0415 - the training process needs no HTTP client

    bound_answers()
    _VARIABLES.apply(connection)
    if server := server_of(connection.uri):
        os.environ[BASE_URL] = server
