"""Commands that messages and pages name exist and work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.commands import memlog, output_of
from support.journals import GIB, MadeRun, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.cli.main import cli
from memlog.cli.mcp import SKILL
from memlog.errors import MissingExtraError
from memlog.events import End
from memlog.session.exit import print_undelivered
from memlog.sink import load_backend

ROOT = Path(__file__).parents[3]
CODE = [
    path
    for folder in ("memlog", "integrations", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").rglob("*.md"))]

_PIP = re.compile(r"\bpip install ([^`#\n\"]*)")
_MEMLOG = re.compile(r"(?:`|\$ )memlog ([a-z]+)((?: [^`#|\n]*)?)")


def project_section(name: str) -> str:
    """Lines of pyproject.toml; Python 3.10 can't read TOML."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.split(r"^\[", text.partition(f"[{name}]\n")[2], flags=re.MULTILINE)[0]


def known_packages() -> set[str]:
    """Return the names of the packages that memlog and its development need."""
    sections = project_section("project.optional-dependencies") + project_section(
        "dependency-groups"
    )
    return {name.lower() for name in re.findall(r"\"([A-Za-z][\w.-]*)[\[>=<!]", sections)} - {
        "memlog-ml"
    }


def named(paths: list[Path], pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for path in paths:
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(ROOT)}: {match[0]}", match


def test_what_messages_have_pip_install_is_in_an_index() -> None:
    packages = known_packages()
    assert {"torch", "mlflow", "wandb", "phiml"} <= packages
    checked = 0
    for where, match in named(CODE, _PIP):
        if "{" in match[1]:
            continue  # filled in with the backend's own packages: the next test
        words = shlex.split(match[1].partition(", or ")[0])
        assert words, where
        assert {re.split(r"[\[>=<!]", word)[0] for word in words} <= packages, where
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("backend", ["mlflow", "wandb"])
def test_a_missing_client_is_named_by_its_own_package(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlog.sink.search.is_installed", lambda _: False)
    with pytest.raises(MissingExtraError) as caught:
        load_backend(backend)
    found = re.search(r"pip install '([a-z]+)>=[\d.]+'$", str(caught.value))
    assert found is not None, caught.value
    assert found[1] == backend


def test_every_page_installs_what_pip_can_find() -> None:
    for where, match in named(PAGES, _PIP):
        words = shlex.split(match[1])
        assert "--group" not in words, where  # pip 25.1 and newer
        assert not any(word.startswith("memlog-ml") for word in words), where


def lines_to_type(page: Path) -> Iterator[str]:
    """Yield the commands of memlog's in blocks of sh, as prose after a dollar sign."""
    for block in re.findall(
        r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        for line in block.splitlines():
            if line.startswith("memlog "):
                yield f"$ {line}"


def test_commands_in_blocks_of_sh_exist_with_their_options() -> None:
    checked = 0
    for page in PAGES:
        for line in lines_to_type(page):
            match = _MEMLOG.search(line)
            assert match is not None, line
            expect_known(match, f"{page.relative_to(ROOT)}: {line}")
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("paths", [CODE, PAGES], ids=["code", "pages"])
def test_commands_of_memlogs_own_exist_with_their_options(paths: list[Path]) -> None:
    checked = 0
    for where, match in named(paths, _MEMLOG):
        expect_known(match, where)
        checked += 1
    assert checked > 20


def expect_known(match: re.Match[str], where: str) -> None:
    command = cli.get_command(click.Context(cli), match[1])
    assert command is not None, where
    known = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    mine = match[2].partition(" -- ")[0]  # what follows is the user's command
    used = {word.partition("=")[0] for word in re.findall(r"(?<=\s)--?[a-z][\w-]*", mine)}
    assert used <= known | {"--help"}, where


_NAMES_A_RUN = re.compile(r"\bmemlog (?:sync|show|open|pull|advise|compare) \{")


def test_a_command_with_a_run_names_its_folder_where_it_has_to() -> None:
    """Only `RunDirectory.command` finds out whether a command needs ``--dir`` to find the run."""
    messages = [path for path in CODE if "examples" not in path.parts]
    for where, match in named(messages, _NAMES_A_RUN):
        allowed = where.startswith("memlog/cli/runs.py")  # looks for such a line in a message
        allowed |= match.string[match.end() :].startswith("shlex.quote")  # a file, no run
        assert allowed, where


@pytest.mark.parametrize("folder", ["memlog_runs", "else where/runs"])
def test_the_line_for_a_run_works_as_it_is_printed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMLOG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    run = MadeRun(tmp_path / folder).write(batch(0, GIB), End(1, "finished")).closed()
    program, *words = shlex.split(run.command("show"))
    assert program == "memlog"
    assert (len(words) == 2) == (folder == "memlog_runs")
    [line] = re.findall(
        r"`memlog (sync .*?) --to mlflow`", output_of(*words, "--all").replace("\n", " ")
    )
    assert shlex.split(line)[1:] == words[1:]
    monkeypatch.chdir("/")
    assert memlog(*shlex.split(run.command("show"))[1:]).exit_code == 0


def test_the_end_of_a_program_names_the_folder_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEMLOG_DIR", raising=False)
    run = MadeRun(tmp_path / "mine").write(batch(0, GIB)).closed()
    print_undelivered(run, "dead", 0.0, 5.0, Diagnostics())
    [line] = re.findall("`memlog (.*?)`", capsys.readouterr().err)
    assert shlex.split(line) == ["sync", run.id, "--dir", str(tmp_path / "mine")]
