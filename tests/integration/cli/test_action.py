"""The steps of ``action.yml``, run as a runner of GitHub runs them, with GitHub's interface on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.journals import GIB, MIB, MadeRun, at, batch

from memlog.events import End, Run, Trace

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
_EXPRESSION = re.compile(r"\$\{\{ (.+?) \}\}")


class GitHub(ThreadingHTTPServer):
    """Comments of a pull request. Creates and changes them as GitHub's REST interface does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.comments: list[dict[str, Any]] = []
        self.refuses = False
        self.tokens: set[str | None] = set()


class _Handler(BaseHTTPRequestHandler):
    server: GitHub

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, document: Any, code: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(403 if self.server.refuses else code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> str:
        self.server.tokens.add(self.headers["Authorization"])
        return str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"])

    def do_GET(self) -> None:
        assert self.path.startswith("/repos/me/nets/issues/7/comments?per_page=100&page=")
        page = int(self.path.rpartition("=")[2])
        self._answer(self.server.comments[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        assert self.path == "/repos/me/nets/issues/7/comments"
        body = self._body()
        if not self.server.refuses:
            self.server.comments.append({"id": len(self.server.comments), "body": body})
        self._answer({}, 201)

    def do_PATCH(self) -> None:
        which = int(self.path.removeprefix("/repos/me/nets/issues/comments/"))
        self.server.comments[which]["body"] = self._body()
        self._answer({})


@pytest.fixture
def github() -> Iterator[GitHub]:
    with GitHub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Job:
    """A job's folder, files and environment on a runner."""

    def __init__(self, folder: Path, github: GitHub) -> None:
        self.folder = folder
        (folder / "temp").mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)
        command = folder / "bin" / "memlog"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m memlog "$@"\n')
        command.chmod(0o755)
        event = folder / "event.json"
        event.write_text(json.dumps({"pull_request": {"number": 7}}))
        self.summary, self.outputs = folder / "summary.md", folder / "output"
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": paths,
            "MEMLOG_DIR": str(folder / "runs"),
            "RUNNER_TEMP": str(folder / "temp"),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_API_URL": f"http://127.0.0.1:{github.server_address[1]}",
            "GITHUB_REPOSITORY": "me/nets",
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self.outputs),
        }

    def run(self, **inputs: str) -> list[subprocess.CompletedProcess[str]]:
        """Run the steps until one fails. ``fail_if`` stands for the input ``fail-if``."""
        values = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()}
        values |= {name.replace("_", "-"): value for name, value in inputs.items()}
        values["token"] = "t0ken"  # noqa: S105 - no real one
        self.outputs.write_text("")
        done = []
        for step in STEPS.values():
            done.append(self._step(step, values))
            if done[-1].returncode:
                break
        return done

    def _step(
        self, step: dict[str, Any], values: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        outputs = dict(line.split("=", 1) for line in self.outputs.read_text().splitlines())

        def value(found: re.Match[str]) -> str:
            kind, _, name = found[1].rpartition(".")
            return values[name] if kind == "inputs" else outputs[name]

        environment = {name: _EXPRESSION.sub(value, text) for name, text in step["env"].items()}
        assert not _EXPRESSION.search(
            step["run"]
        )  # an input in the script's text could run commands
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def job(tmp_path: Path, github: GitHub) -> Job:
    for run_id, peak in (("aaaa2222", 100 * MIB), ("bbbb2222", 110 * MIB)):
        MadeRun(tmp_path / "runs", run_id).write(
            Run(at(0), "tiny", None, (), {}),
            batch(0, GIB),
            Trace(at(1), 3, "dispatch", True, peak, {"activations": peak}, (), 0),
            End(at(9), "finished"),
        ).closed()
    made = Job(tmp_path, github)
    written = {"figures": {"trace.peak": 100 * MIB}, "categories": {"activations": 100 * MIB}}
    content = {"schema": 1, "trainings": {"tiny": written}}
    (tmp_path / "memory.json").write_text(json.dumps(content))
    return made


def test_a_failed_gate_fails_the_job_after_the_comment(job: Job, github: GitHub) -> None:
    gates = "trace.peak > +1%\n\ntrace.peak > 600 MiB\n"
    compare, comment, verdict = job.run(baseline="memory.json", runs="bbbb2222", fail_if=gates)
    assert (compare.returncode, comment.returncode, verdict.returncode) == (0, 0, 1)
    assert compare.stdout.splitlines() == [
        "::error title=memlog trace.peak::the gate 'trace.peak > +1%25' failed: run bbbb2222 has 110.0 MiB "
        "against 100.0 MiB (+10.0 %25)",
        "::notice title=memlog trace.peak::the gate 'trace.peak > 600 MiB' passed: run bbbb2222 has 110.0 "
        "MiB",
    ]
    summary = job.summary.read_text()
    assert summary.startswith("## Memory of the training\n\n**Gates: 1 failed, 1 passed**\n")
    assert "| activations | 100.0 MiB | 110.0 MiB | +10.0 MiB (+10.0 %) |" in summary
    [written] = github.comments
    assert written["body"].startswith(summary)
    assert github.tokens == {"Bearer t0ken"}


def test_a_later_comment_replaces_the_one_of_its_title(job: Job, github: GitHub) -> None:
    github.comments += [{"id": at, "body": "other"} for at in range(150)]
    for _ in range(2):
        steps = job.run(baseline="memory.json", runs="aaaa2222", fail_if="trace.peak > +1%")
        assert [step.returncode for step in steps] == [0, 0, 0]
    job.run(runs="bbbb2222", fail_if="trace.peak > 1 GiB", title="Another")
    assert len(github.comments) == 152
    assert "No category changed." in github.comments[150]["body"]
    assert github.comments[151]["body"].startswith("## Another\n")


def test_a_token_that_may_not_write_is_a_warning(job: Job, github: GitHub) -> None:
    github.refuses = True
    steps = job.run(baseline="memory.json", runs="aaaa2222")
    assert [step.returncode for step in steps] == [0, 0, 0]
    assert steps[1].stdout.startswith("::warning title=memlog::could not comment on pull request 7")
    assert github.comments == []


@pytest.mark.parametrize(
    ("inputs", "code", "says"),
    [
        ({"runs": "none"}, 2, "name two runs or more"),
        ({"runs": "none", "baseline": "memory.json"}, 1, "is called 'none'"),
        ({"runs": "aaaa2222", "fail_if": "trace.peek > 1 GiB"}, 2, "did you mean trace.peak?"),
        ({"runs": "$(touch evil)", "baseline": "memory.json"}, 1, "is called '$(touch evil)'"),
    ],
)
def test_a_mistake_ends_the_first_step(
    job: Job, inputs: dict[str, str], code: int, says: str
) -> None:
    [compare] = job.run(**inputs)
    assert compare.returncode == code
    assert says in compare.stderr
    assert not (job.folder / "evil").exists()


def test_each_input_and_output_is_described() -> None:
    for each in (*ACTION["inputs"].values(), *ACTION["outputs"].values()):
        assert each["description"]
    assert list(STEPS) == ["Compare", "Comment", "Verdict"]
    assert STEPS["Comment"]["if"] == "inputs.comment == 'true' && github.event.pull_request"
