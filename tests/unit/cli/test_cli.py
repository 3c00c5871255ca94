"""Arguments, output and errors of the command line."""

import click
import pytest
from support.commands import memlog, said

from memlog._version import __version__
from memlog.cli.main import cli
from memlog.cli.output import duration, number, one_line

pytestmark = pytest.mark.usefixtures("plain_environment")


def surface(command: click.Command) -> dict[str, list[str]]:
    return {
        parameter.name or "": [*parameter.opts, *parameter.secondary_opts]
        for parameter in command.params
    }


def test_the_commands_and_their_options_are_frozen() -> None:
    assert surface(cli) == {"version": ["--version"]}
    assert {name: surface(command) for name, command in cli.commands.items()} == {
        "advise": {"run": ["run"], "as_json": ["--json"], "directory": ["--dir"]},
        "estimate": {
            "target": ["target"],
            "batches": ["--batch"],
            "lengths": ["--length"],
            "memory": ["--device"],
            "cpu": ["--cpu"],
            "as_json": ["--json"],
        },
        "compare": {
            "runs": ["runs"],
            "gates": ["--fail-if"],
            "allow_unfinished": ["--allow-unfinished"],
            "as_json": ["--json"],
            "directory": ["--dir"],
        },
        "completion": {"shell": ["shell"]},
        "demo": {"steps": ["--steps"], "backend": ["--backend"]},
        "open": {
            "what": ["what"],
            "browser": ["--no-browser"],
            "port": ["--port"],
            "directory": ["--dir"],
        },
        "pull": {
            "run": ["run"],
            "backend": ["--backend"],
            "kind": ["--kind"],
            "output": ["-o", "--output"],
            "trusted": ["--trust-address"],
            "force": ["--force"],
            "directory": ["--dir"],
        },
        "report": {"runs": ["runs"], "output": ["-o", "--output"], "directory": ["--dir"]},
        "run": {
            "backends": ["--backend"],
            "alerts": ["--alert"],
            "project": ["--project"],
            "name": ["--name"],
            "every": ["--every"],
            "layers": ["--layers"],
            "budget": ["--budget"],
            "directory": ["--dir"],
            "command": ["command"],
        },
        "runs": {"as_json": ["--json"], "directory": ["--dir"]},
        "show": {"run": ["run"], "as_json": ["--json"], "directory": ["--dir"]},
        "sync": {
            "run": ["run"],
            "backend": ["--to"],
            "timeout": ["--timeout"],
            "replace": ["--own-run"],
            "trusted": ["--trust-address"],
            "directory": ["--dir"],
        },
        "watch": {
            "run": ["run"],
            "once": ["--once"],
            "interval": ["--interval"],
            "as_json": ["--json"],
            "directory": ["--dir"],
        },
    }


def test_version_and_help() -> None:
    assert said("--version") == f"memlog, version {__version__}\n"
    assert said("-h") == said("--help")
    for name in cli.commands:
        assert said(name, "-h").startswith(f"Usage: memlog {name} ")


def test_wrong_use_is_explained_without_a_traceback() -> None:
    for arguments in (
        ("show",),
        ("shw",),
        ("show", "--jsn", "latest"),
        ("sync", "x", "--timeout", "-1"),
    ):
        result = memlog(*arguments)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert "Traceback" not in result.output


def test_every_commands_help_can_be_read() -> None:
    overview = said("--help")
    assert "..." not in overview.partition("Commands:")[2]
    for name in cli.commands:
        help_text = said(name, "--help")
        assert "\\b" not in help_text
        assert "\b" not in help_text
    lines = said("run", "--help").splitlines()
    assert "  memlog run -- bash job.sh" in lines
    assert "wandb" in said("run", "--help")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3599.9, "1 h 0 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_a_duration_is_written_in_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00412, "0.00412"),
        (2.5, "2.5"),
        (-3.14159, "-3.142"),
        (12345.67, "12,345.7"),
    ],
)
def test_a_number_is_written_with_few_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_message_is_one_line() -> None:
    assert one_line("first\nsecond\tthird") == "first second\N{REPLACEMENT CHARACTER}third"
