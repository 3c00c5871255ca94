"""Run the code on the documentation's pages as a reader would.

On a page, in order:

* a block of Python runs in the page's own process; the block of text behind it shows what it prints;
* a block with a title is a file;
* a block of console shows commands, and what they print. The ids of runs that a page shows stand for the
  runs that were recorded, in their order;
* a block of sh is not run.

Shown lines are among the printed ones, in their order: a page may leave out lines.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from memlog.cli.main import cli
from support import child, hyco
from support.fork_server import ForkedProcess, libraries_of

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r'^```(python|console|text|sh|yaml)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
_ELSEWHERE = ("$ make ", "$ source ", "$ mlflow ui", "$ memlog open", "$ memlog watch", "$ pip ")
"""Commands of console blocks that a test can't run, or that another test does."""
_LIMIT_S = 240
_ID = re.compile(r"\b(?=\w*\d)[a-z0-9]{8}\b")
"""Pattern of a run's id on pages: eight letters and digits, with at least one digit."""

_SHELL = Path(__file__).with_name("page_shell.py")


class Step(NamedTuple):
    """A block of a page: its program, and the lines that the page shows."""

    kind: str
    title: str
    code: str
    shown: str = ""


def steps(page: Path) -> list[Step]:
    """The blocks of a page that are run, in order."""
    found: list[Step] = []
    for language, title, code in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            found[-1] = found[-1]._replace(shown=code)
        elif language == "console":
            found += _commands(code)
        elif title:
            found.append(Step("file", title, code))
        elif language == "python":
            found.append(Step("python", "", code))
    return found


def _commands(block: str) -> Iterator[Step]:
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
        command, _, shown = part.partition("\n")
        if command.startswith("$ ") and not command.startswith(_ELSEWHERE):
            yield Step("command", "", command.removeprefix("$ "), shown)


class Reader:
    """Runner of a page's steps in a folder, the test's working directory, as one reader with one terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.exit_code = 0
        self._ids: list[str] = []
        self._shell: subprocess.Popen[str] | None = None

    def run(self, step: Step) -> str:
        """Run a step and return its output, with ``RUN`` for each run's id."""
        printed = self._run(step)
        for run in self._runs():
            printed = printed.replace(run, "RUN")
        self._ids += [one for one in dict.fromkeys(_ID.findall(step.shown)) if one not in self._ids]
        return printed

    def _run(self, step: Step) -> str:
        if step.kind == "file":
            (self.folder / step.title).write_text(step.code, encoding="utf-8")
            return ""
        if step.kind == "python":
            return self._run_python(step.code)
        command = step.code
        for shown, run in zip(self._ids, self._runs(), strict=False):
            command = command.replace(shown, run)
        return self._run_command(command)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.communicate(timeout=_LIMIT_S)
            self.exit_code = self.exit_code or self._shell.returncode

    def _run_python(self, code: str) -> str:
        if self._shell is None:
            variables = {**hyco.environment(), **self.environment}
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            libraries = libraries_of(code) if sys.platform == "linux" else ()
            if libraries:
                self._shell = ForkedProcess(
                    libraries, _SHELL, (), self.folder, self.folder, variables, **streams
                )
            else:
                self._shell = subprocess.Popen(
                    [sys.executable, _SHELL], cwd=self.folder, env=variables, text=True, **streams
                )
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(json.dumps(code) + "\n")
        self._shell.stdin.flush()
        line = self._shell.stdout.readline()
        assert line, f"this code fails, see above:\n{code}"
        printed: str = json.loads(line)
        return printed

    def _run_command(self, command: str) -> str:
        """Run a command, and keep its exit code for a later ``echo $?``."""
        words = shlex.split(command, comments=True)
        if command == "echo $?":
            code, self.exit_code = self.exit_code, 0
            return f"{code}\n"
        assert self.exit_code == 0, f"the command before {command!r} failed"
        if words[0] == "memlog" and words[1] != "run":
            return self._run_memlog(words[1:])
        if words[0] == "cat":
            return "".join(path.read_text() for path in self.folder.glob(words[1]))
        return self._run_program(words)

    def _run_memlog(self, arguments: Sequence[str]) -> str:
        done = CliRunner().invoke(cli, arguments, env={"MEMLOG_DIR": None, "COLUMNS": "110"})
        self.exit_code = done.exit_code
        return done.output

    def _run_program(self, words: list[str]) -> str:
        if words[0] == "memlog":
            program = child.start_memlog(
                *(sys.executable if word == "python" else word for word in words[1:]),
                directory=self.folder,
                **self.environment,
            )
        else:
            assert words[:2] == ["python", "train.py"]
            script = (self.folder / words[1]).read_text(encoding="utf-8")
            program = child.start(script, self.folder, *words[2:], **self.environment)
        printed, errors = program.communicate(timeout=_LIMIT_S)
        self.exit_code = program.returncode
        return printed + errors

    def _runs(self) -> list[str]:
        folders = self.folder.glob("memlog_runs/*/")
        return [run.name for run in sorted(folders, key=lambda run: run.stat().st_ctime)]


def masked(text: str) -> list[str]:
    """Return lines without numbers, ids, times and sources of peaks, which differ between runs."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "RUN", _ID.sub("RUN", text))
    text = re.sub(r"/\S*/(?=memlog_runs)", "", text)
    text = re.sub(
        r", and memory (?:runs|would have run) out at step [\d,]+( to [\d,]+)? \(.*?\)", "", text
    )
    # With some twenty steps, the load of the machine decides whether memlog calls the program steady.
    text = re.sub(r"^(No growth|Unsure: ).*$", "No growth", text, flags=re.MULTILINE)
    text = re.sub(r"\b(exact|watermark \(upper bound\)|sampled \(lower bound\))", "SOURCE", text)
    text = re.sub(r"\b(peak [\d.,]+ MB) \(watermark\)", r"\1", text)
    text = re.sub(r"[-+\u2212]?\d[\d.,:]*(e-?\d+)?", "#", text)
    text = re.sub(r"# (B|KiB|MiB|GiB)\b", "# bytes", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows and the program did not print. The order of lines counts.

    A shown line that ends with an ellipsis is the beginning of a printed line.
    """
    rest = iter(masked(printed))
    return [line for line in masked(shown) if line.strip("…") and not any(map(_fits(line), rest))]


def _fits(line: str) -> Callable[[str], bool]:
    if line.endswith("…"):
        return lambda printed: printed.startswith(line.rstrip(" …"))
    return lambda printed: printed == line
