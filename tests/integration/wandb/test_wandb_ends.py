"""W&B runs of the user's that end before memlog does: one run, several in a row, and one opened again."""

from pathlib import Path

import pytest
from support import child
from support.in_process import PREAMBLE, assert_every_step_is_there, recorded, sync_offline
from support.truth import plan_of
from support.wandb_file import WandbFile, find_runs, read_run

from memlog.reports import summarize
from memlog.reports.schema import Delivery

pytestmark = pytest.mark.integration


def train(script: str, directory: Path) -> str:
    """Run a script and return what it printed on standard error."""
    process = child.start(PREAMBLE + script, directory, "--memlog")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return errors


def held(directory: Path) -> list[WandbFile]:
    return [read_run(path) for path in find_runs(directory)]


def delivery_of(directory: Path) -> Delivery:
    run = recorded(directory)
    (delivery,) = summarize(run).health.delivered.values()
    return delivery


def series_of(run: WandbFile) -> list[tuple[str, int, float]]:
    """Return names, indices and values in the newest series among a run's artifacts."""
    newest = [artifact for artifact in run.artifacts if artifact["type"] == "series"][-1]
    lines = Path(next(iter(newest["files"].values()))).read_text().splitlines()[1:]
    rows = (line.split(",") for line in lines)
    return [(name, int(index), float(value)) for _, index, _, name, value in rows]


def test_steps_between_two_openings_of_one_run_reach_it(tmp_path: Path) -> None:
    train(
        """
    first = start(id="sameid")
    for s in steps(5):
        first.log({"loss": s}, step=s)
        time.sleep(0.2)  # a pass for each row: nothing but the steps between is folded
    first.finish()
    for s in steps(5, first=5):
        pass
    time.sleep(1)
    second = start(id="sameid", resume="allow")
    for s in steps(5, first=10):
        second.log({"loss": s}, step=s)
        time.sleep(0.2)
    memlog.finish()
    second.finish()
    """,
        tmp_path,
    )
    again = held(tmp_path)[-1]
    assert again.users_rows() == [{"loss": s, "_step": s} for s in range(10, 15)]
    planned = [(p.name, p.index, p.value) for p in plan_of(recorded(tmp_path), "full")]
    assert sorted(series_of(again)) == sorted(planned)
    assert {index for _, index, _ in series_of(again)} == set(range(15))
    assert delivery_of(tmp_path).stage == "done"


def test_what_a_run_that_was_opened_twice_lacks_is_not_forgotten(tmp_path: Path) -> None:
    errors = train(
        """
    for begin in (0, 10):
        run = start(id="sameid", resume="allow")
        for s in steps(5, first=begin):
            run.log({"loss": s}, step=s)
            time.sleep(0.05)
        run.finish()
        for s in steps(5, first=begin + 5):
            pass
    """,
        tmp_path,
    )
    assert "run sameid ended before memlog had written everything" in errors
    assert delivery_of(tmp_path).stage == "waiting"
    sync_offline(tmp_path)
    made = next(run for run in held(tmp_path) if run.job_type == "memlog")
    assert_every_step_is_there(made, recorded(tmp_path))
    assert delivery_of(tmp_path).stage == "done"


SWEEP = """
    for trial in range(COUNT):
        run = start(id=f"trial{trial}")
        for s in steps(30):
            if s % 10 == 9:
                run.log({"loss": s})
        run.finish()
"""


def test_each_run_of_a_sweep_gets_everything_as_it_ends(tmp_path: Path) -> None:
    errors = train(SWEEP.replace("COUNT", "2") + "    memlog.finish()\n", tmp_path)
    assert "memlog sync" not in errors
    runs = held(tmp_path)
    assert [run.run_id for run in runs] == ["trial0", "trial1"]
    assert [[row["loss"] for row in run.users_rows()] for run in runs] == [[9, 19, 29]] * 2
    # The journal counts the session's steps. Each run counts its own steps.
    planned = [(p.name, p.index % 30, p.value) for p in plan_of(recorded(tmp_path), "full")]
    steps = [
        {index for name, index, _ in series_of(run) if name == "memory/host/rss_mib"}
        for run in runs
    ]
    assert steps == [set(range(30)), set(range(30))]
    # A run may lack only figures of its last step: the helper may read them after the run has ended.
    lacking = set(planned) - set(series_of(runs[0]) + series_of(runs[1]))
    assert {index for _, index, _ in lacking} <= {29}
    sampled = {f"memory/host/{what}_mib" for what in ("available", "cgroup", "tree")}
    assert {name for name, _, _ in lacking if not name.startswith("memlog/")} <= sampled
    assert [max(row["memlog/step"] for row in run.memlogs_rows()) for run in runs] == [29, 29]
    assert delivery_of(tmp_path).stage == "done"
    assert "nothing" in sync_offline(tmp_path)
    assert len(find_runs(tmp_path)) == 2


def test_a_sweep_that_is_killed_lacks_something_in_the_last_run_alone(tmp_path: Path) -> None:
    process = child.start(
        PREAMBLE
        + SWEEP.replace("COUNT", "2").replace(
            "        run.finish()",
            "        if trial: import os; os.kill(os.getpid(), 9)\n        run.finish()\n"
            "        time.sleep(2)",
        ),
        tmp_path,
        "--memlog",
    )
    process.communicate(timeout=120)
    assert delivery_of(tmp_path).stage == "waiting"
    assert "whole series" in child.memlog("show", "latest", "--all", directory=tmp_path)
    sync_offline(tmp_path)
    made = [read_run(path) for path in find_runs(tmp_path) if "memlog" in path.name]
    assert [(run.group, run.exit_code) for run in made] == [("trial1", 255)]


def test_what_is_kept_just_before_the_end_of_each_run_reaches_it(tmp_path: Path) -> None:
    """The writer may be busy when the user ends a run. The end waits until the writer has read all files."""
    errors = train(
        """
    from pathlib import Path

    for number in range(12):
        run = start()
        for s in steps(10):
            run.log({"loss": s}, step=s)
        for name in ("a", "b", "c"):
            kept = Path(f"{name}-{number}.html")
            kept.write_text(name * 200_000)
            session.save_artifact(kept, kind="report")
        run.finish()
    memlog.finish()
    """,
        tmp_path,
    )
    assert "ended before memlog had written everything" not in errors
    assert delivery_of(tmp_path).stage == "done"
    for run in held(tmp_path):
        assert sum(artifact["type"] == "report" for artifact in run.artifacts) == 4
        assert run.summary["memlog/report"]["_type"] == "html-file"  # the fourth is memlog's
