"""Functions that run memlog's commands in this process."""

from click.testing import CliRunner, Result

from memlog.cli.main import cli


def memlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="memlog")


def output_of(*arguments: str) -> str:
    """Return the output of a command; fail if the command fails."""
    result = memlog(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def complaint(*arguments: str, code: int = 1) -> str:
    """Return the one line that a failing command prints."""
    result = memlog(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("memlog: ")
    return line.removeprefix("memlog: ")
