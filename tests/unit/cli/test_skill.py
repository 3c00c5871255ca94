"""memlog's skill for agents, in the format of agentskills.io."""

import re

from support.commands import output_of

from memlog.cli.mcp import SKILL
from memlog.reports.brief import tokens

TEXT = SKILL.read_text(encoding="utf-8")
FIELDS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}


def front_matter() -> dict[str, str]:
    _, head, _ = TEXT.split("---\n", 2)
    return dict(line.split(": ", 1) for line in head.splitlines())


def test_the_front_matter_is_that_of_the_format() -> None:
    found = front_matter()
    assert set(found) <= FIELDS
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found["name"])
    assert len(found["name"]) <= 64
    assert found["name"] == SKILL.parent.name
    assert 0 < len(found["description"]) <= 1024
    assert len(found["compatibility"]) <= 500
    assert not any(": " in text for text in found.values())  # it would need quotes in YAML


def test_an_agent_can_read_it_whole() -> None:
    assert len(TEXT.splitlines()) < 500
    assert tokens(TEXT) < 5000


def test_the_command_prints_it() -> None:
    assert output_of("mcp", "--skill") == TEXT
