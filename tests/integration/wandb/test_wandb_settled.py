"""W&B runs of the user's that end before memlog does: the verdict is in the run before it closes."""

import html
import re
from pathlib import Path

import pytest
from support import child
from support.in_process import PREAMBLE, recorded
from support.wandb_file import WandbFile, find_runs, read_only_run, read_run

from memlog.reports import summarize

pytestmark = pytest.mark.integration

LEAK = """
    import torch

    def leak(run, count=120):
        kept = []
        for s in steps(count):
            kept.append(torch.ones(512, 512))
            if s % 10 == 0:
                run.log({"loss": s}, step=s)
        return kept
"""
ENDINGS = {
    "finish": """
    run = start()
    kept = leak(run)
    run.finish()
    """,
    "with": """
    with start(name="an earlier name") as run:
        kept = leak(run)
        run.name = "the user's"
    """,
    "at exit": """
    run = start()
    kept = leak(run)
    """,
    "memlog first": """
    run = start()
    kept = leak(run)
    memlog.finish()
    run.finish()
    """,
    "atexit of the user's": """
    import atexit
    run = start()
    atexit.register(run.finish)
    kept = leak(run)
    """,
}


def train(script: str, directory: Path, status: int = 0) -> str:
    """Run a script and return what it printed on standard error."""
    process = child.start(PREAMBLE + LEAK + script, directory, "--memlog")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == status, errors
    return errors


def report_of(run: WandbFile) -> str:
    """Return the newest report among a run's artifacts, as text."""
    newest = [artifact for artifact in run.artifacts if artifact["type"] == "report"][-1]
    page = Path(next(iter(newest["files"].values()))).read_text()
    text = re.sub(r"<[^>]+>", " ", re.sub("</?code>", "`", page))
    return " ".join(html.unescape(text).split())


def assert_is_complete(run: WandbFile, errors: str, last_step: int) -> None:
    assert "memlog sync" not in errors
    assert max(row.get("memlog/step", 0) for row in run.memlogs_rows()) == last_step
    assert {"memlog/command", "memlog/host", "memlog/python", "memlog/overhead_ms"} <= set(
        run.config
    )
    names = {name for row in run.memlogs_rows() for name in row}
    assert {"memory/host/rss_mib", "memory/host/tree_mib"} <= names
    assert run.summary["memlog/report"]["_type"] == "html-file"


@pytest.mark.parametrize("how", ENDINGS)
def test_the_verdict_is_in_the_run_when_it_closes(tmp_path: Path, how: str) -> None:
    errors = train(ENDINGS[how], tmp_path)
    run = read_only_run(tmp_path)
    assert_is_complete(run, errors, 119)
    summary = summarize(recorded(tmp_path))
    assert "`kept`" in summary.verdict
    assert summary.verdict in report_of(run)
    assert summary.verdict in errors
    assert len([alert for alert in run.alerts if "`kept`" in alert["title"]]) == 1
    assert [one.stage for one in summary.health.delivered.values()] == ["done"]
    if how == "with":
        assert " the user's " in report_of(run).split("memory report")[1]
        assert "finished  the user's\n" in child.memlog("show", "latest", directory=tmp_path)


BAD_ENDS = {
    "an exception": ('raise RuntimeError("boom")', "failed"),
    "Ctrl-C": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", "killed"),
}


@pytest.mark.parametrize("how", BAD_ENDS)
def test_a_run_that_ends_badly_has_its_verdict(tmp_path: Path, how: str) -> None:
    end, status = BAD_ENDS[how]
    script = f"""
    with start() as run:
        kept = leak(run)
        {end}
    """
    errors = train(script, tmp_path, -2 if status == "killed" else 1)
    run = read_only_run(tmp_path)
    assert run.exit_code == 1
    assert_is_complete(run, errors, 119)
    summary = summarize(recorded(tmp_path))
    assert summary.status == status
    assert "`kept`" in summary.verdict
    assert summary.findings[0].title in report_of(run)
    assert f" {status} " in report_of(run)


def test_each_run_of_a_session_keeps_its_own_verdict(tmp_path: Path) -> None:
    errors = train(
        """
    first = start(id="first")
    for s in steps(120):
        first.log({"loss": s}, step=s)
    first.finish()
    second = start(id="second")
    kept = leak(second)
    second.finish()
    third = start(id="third")
    for s in steps(120):
        third.log({"loss": s}, step=s)
    third.finish()
    """,
        tmp_path,
    )
    assert "memlog sync" not in errors
    first, second, third = (read_run(path) for path in find_runs(tmp_path))
    assert [run.run_id for run in (first, second, third)] == ["first", "second", "third"]
    assert "`kept`" not in report_of(first)
    assert "`kept`" in report_of(second)
    for run in (first, second, third):
        assert_is_complete(run, errors, 119)
    assert [[alert["title"] for alert in run.alerts] for run in (first, third)] == [[], []]
    assert len(second.alerts) == 1
    assert errors.count("`kept`, a list") == 2  # after the next step, and in the last line


def test_a_client_that_hangs_delays_the_end_by_a_second(tmp_path: Path) -> None:
    errors = train(
        """
    protocol.SETTLED_WITHIN = 1.0
    run = start()
    kept = leak(run)
    run.log_artifact = lambda *_: time.sleep(600)
    begun = time.monotonic()
    run.finish()
    took = time.monotonic() - begun
    assert took < 30, took
    session.finish(timeout=1)
    """,
        tmp_path,
    )
    run = read_only_run(tmp_path)
    assert max(row["memlog/step"] for row in run.memlogs_rows()) == 119
    assert "memlog sync" in errors
