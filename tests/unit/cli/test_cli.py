"""Arguments, output and errors of the command line."""

import json
import subprocess
import sys

import msgspec
import pytest
from support.commands import memlog, output_of

from memlog._internal.terminal import format_duration, format_number, one_line
from memlog._version import __version__
from memlog.cli.main import COMMANDS, command_named
from memlog.cli.output import print_json

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_the_commands_and_their_options_are_frozen() -> None:
    assert {
        name: " ".join(
            name for option in command.params for name in (*option.opts, *option.secondary_opts)
        )
        for name, command in ((each, command_named(each)) for each in COMMANDS)
    } == {
        "advise": "run --fit --json --dir",
        "estimate": "target --batch --length --device --cpu --gpu --ranks --fit --json",
        "compare": "runs --fail-if --update --allow-unfinished --format --json --dir",
        "completion": "shell",
        "demo": "--steps --tiny --backend",
        "doctor": "--json --dir",
        "mcp": "--skill --dir",
        "open": "what --no-browser --port --dir",
        "pull": "run --backend --kind -o --output --force --trust-address --dir",
        "report": "runs -o --output --dir",
        "run": "--backend --alert --alert-webhook --project --name --every --layers --budget --quiet --dir "
        "command",
        "runs": "--json --dir",
        "show": "run --all --brief --json --dir",
        "sync": "run --to --timeout --own-run --trust-address --dir",
        "watch": "run --once --interval --json --dir",
    }


def test_version_and_help() -> None:
    assert output_of("--version") == f"memlog, version {__version__}\n"
    assert "..." not in output_of("--help").partition("Commands:")[2]
    for name in COMMANDS:
        text = output_of(name, "-h")
        assert text.startswith(f"Usage: memlog {name} ")
        assert "\\b" not in text
        assert "\b" not in text
    assert "  memlog run -- bash job.sh" in output_of("run", "--help").splitlines()


def test_a_wrong_argument_does_not_control_the_terminal() -> None:
    result = memlog("runs", "extra\x1b[31m\x07")
    shown = result.stderr
    assert result.exit_code == 2
    assert "extra\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_json_has_no_character_that_controls_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b\x9b\x7f\u202eb\u00e9"
    print_json(msgspec.json.encode({name: name}))
    shown = capsys.readouterr().out
    assert json.loads(shown) == {name: name}
    assert shown.strip().isprintable()
    assert "\u00e9" in shown


def test_the_version_is_printed_without_the_commands() -> None:
    script = (
        "import sys\nfrom memlog.cli.main import main\nsys.argv = ['memlog', '--version']\n"
        "try:\n    main()\nfinally:\n    print(sorted({'rich', 'memlog.cli.show'} & {*sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"memlog, version {__version__}\n[]\n"


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
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00412, "0.00412"), (2.5, "2.5"), (-3.14159, "-3.142"), (12345.67, "12,345.7")],
)
def test_a_number_is_written_with_few_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_message_is_one_line() -> None:
    assert one_line("first\nsecond\tthird\a") == "first second third\N{REPLACEMENT CHARACTER}"
