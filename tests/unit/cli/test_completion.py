"""Completion by the shell: what click is asked by each shell's script, and what memlog answers."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.commands import output_of
from support.journals import GIB, MadeRun, at, batch

from memlog.cli.main import cli
from memlog.events import Run

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs and a folder that is no run. One run has a name that a shell has to quote."""
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    MadeRun(tmp_path, "aaaa2222").write(Run(at(0), "gpt-small", None, (), {})).closed()
    second = MadeRun(tmp_path, "bbbb3333").write(Run(at(0), "two words", None, (), {}))
    second.bound("mlflow", "9f8e7d", None, "quiet-bear").write(batch(0, GIB)).closed()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trainer-1-0001.jsonl").write_bytes(b"\xff")


def answer(shell: str, line: str, **more: str) -> list[str]:
    """Ask as the shell's script does, with the last word of ``line`` incomplete."""
    words = line.split(" ")
    asked = {
        "_MEMLOG_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    result = CliRunner().invoke(cli, [], prog_name="memlog", env={**asked, **more})
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout.splitlines()


def values(shell: str, line: str) -> list[str]:
    if shell == "zsh":  # type, value and help, on three lines
        return answer(shell, line)[1::3]
    return [one.split(",")[1].split("\t")[0] for one in answer(shell, line)]


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_runs_and_backends_are_completed(shell: str) -> None:
    assert values(shell, "memlog wa") == ["watch"]
    assert values(shell, "memlog watch --o") == ["--once"]
    assert values(shell, "memlog show ") == [
        "latest",
        "broken",
        "bbbb3333",
        "quiet-bear",
        "9f8e7d",
        "aaaa2222",
        "gpt-small",
    ]
    for command in ("report", "advise", "pull", "sync", "watch"):
        assert values(shell, f"memlog {command} qui") == ["quiet-bear"]
    assert values(shell, "memlog sync bbbb3333 --to w") == ["wandb", "webhook"]
    for command in ("open", "compare aaaa2222"):  # they take files, too
        assert "quiet-bear" in values(shell, f"memlog {command} q")
    assert values(shell, "memlog completion z") == ["zsh"]


def test_runs_of_the_named_folder_are_completed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    MadeRun(elsewhere, "cccc4444").write(batch(0, GIB)).closed()
    assert values("bash", f"memlog show --dir {elsewhere} cc") == ["cccc4444"]


def test_files_are_left_to_the_shell() -> None:
    assert answer("bash", "memlog open peak.js") == ["file,peak.js"]
    assert answer("bash", "memlog run -- trai") == ["file,trai"]


def test_zsh_and_fish_show_what_a_name_is() -> None:
    assert answer("zsh", "memlog show bbbb") == ["plain", "bbbb3333", "quiet-bear"]
    assert "plain,quiet-bear\trun bbbb3333" in answer("fish", "memlog show qui")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_asks_memlog(shell: str) -> None:
    script = output_of("completion", shell)
    assert f"_MEMLOG_COMPLETE={shell}_complete" in script
    assert "_memlog_completion" in script


def test_nothing_slow_is_imported_for_it() -> None:
    program = (
        "import sys\n"
        "from memlog.cli.main import cli\n"
        "try:\n"
        "    cli(prog_name='memlog')\n"
        "except SystemExit:\n"
        "    print({'torch', 'numpy', 'mlflow', 'wandb'} & set(sys.modules))\n"
    )
    environment = {
        "_MEMLOG_COMPLETE": "bash_complete",
        "COMP_WORDS": "memlog sync ",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
