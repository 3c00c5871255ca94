"""The run that all ranks of a training share, as everything that shows a run tells it."""

import re
import time
from collections.abc import Callable
from typing import NamedTuple

from click.testing import CliRunner

from memlog.cli.main import cli
from memlog.cli.runs import _line
from memlog.events import Alert
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import HelperLock
from memlog.reports import Summary, summarize
from memlog.reports.description import description
from memlog.reports.figures import run_figures
from memlog.reports.live import LiveRun
from memlog.reports.page import html


class Told(NamedTuple):
    """What all surfaces say alike."""

    verdict: str
    status: str
    alerts: list[str]
    """Titles of the alerts about ends."""
    summary: Summary


def told_by_all(run: RunDirectory) -> Told:
    """Return what the surfaces say about a run that is over; fail if two of them disagree."""
    summary, live = summarize(run), LiveRun(run)
    live.update()
    state = live.state([])
    assert summary.status == state.status == run_figures(run).status == _line(run).status
    assert summary.verdict == state.verdict == shown(run).splitlines()[0]
    assert _plain(summary.verdict) == _plain(description(run, "mlflow").splitlines()[0])
    assert "".join(_plain(summary.verdict).split()) in "".join(_plain(html(run)).split())
    rules = ("ranks: ended", "out of memory", "ended unexpectedly", "worker killed")
    alerts = [each.title for each in run.events() if isinstance(each, Alert) and each.rule in rules]
    return Told(summary.verdict, summary.status, alerts, summary)


def shown(run: RunDirectory) -> str:
    root = str(run.path.parent)
    found = CliRunner().invoke(cli, ["show", run.id, "--dir", root], catch_exceptions=False)
    return found.output


def _plain(text: str) -> str:
    return re.sub(r"[`*\\]|<[^>]*>", "", text)


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until_over(run: RunDirectory) -> None:
    """Wait until a run's processes have ended: the training process and the helper process."""
    wait_until(lambda: run.files("helper") and not run.is_alive() and _is_free(run))


def _is_free(run: RunDirectory) -> bool:
    with HelperLock(run) as is_free:
        return is_free
