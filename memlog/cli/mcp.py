"""``memlog mcp``: server of the Model Context Protocol, for agents and editors."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from memlog.cli import SETTINGS
from memlog.cli.output import dir_option, notice
from memlog.errors import MissingExtraError

SKILL = Path(__file__).parents[1] / ".agents" / "skills" / "memlog" / "SKILL.md"
"""Skill in the format of agentskills.io. Tools that collect the skills of installed libraries look here."""


@click.command(
    "mcp", context_settings=SETTINGS, short_help="Serve runs to agents and editors (MCP)."
)
@click.option("--skill", is_flag=True, help="Print memlog's skill (SKILL.md) instead, for agents.")
@dir_option
def serve_agents(directory: Path | None, *, skill: bool) -> None:
    """Serve memlog's runs to agents and editors, over standard input and output.

    The program that starts the server asks for its tools: runs, show, compare, advise and estimate. They read
    the folders of runs; estimate runs the script that it is given. docs/agents.md shows how to add the server
    to editors. It needs the package mcp: pip install 'mcp>=2'
    """
    if skill:
        click.echo(SKILL.read_text(encoding="utf-8"), nl=False)
        return
    try:
        from memlog.cli.agent_tools import server  # noqa: PLC0415 - needs the package mcp
    except ImportError as error:
        if not (error.name or "").startswith("mcp"):
            raise
        raise MissingExtraError(
            "the server needs the package 'mcp', version 2 or newer: pip install 'mcp>=2'"
        ) from error
    if sys.stdin.isatty():
        notice(
            "waiting for an agent or editor on standard input; docs/agents.md shows how to add this command "
            "to one. Ctrl-C ends it"
        )
    server(directory).run()
