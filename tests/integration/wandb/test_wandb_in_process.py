"""Writing to a W&B run of the user's in process: the user's rows stay, and memlog's values are the plan's."""

from pathlib import Path
from textwrap import dedent

import pytest
from support import child
from support.in_process import PREAMBLE, USERS, recorded
from support.truth import plan_of
from support.wandb_file import WandbFile, read_only_run

from memlog.journal import RunDirectory

pytestmark = pytest.mark.integration


def assert_values_are_the_plans(held: WandbFile, run: RunDirectory) -> None:
    """Check each value against the plan up to its row's step, and the peaks and last levels of all rows."""
    first = 1000 if held.rows[0]["_step"] == 1000 else 0  # the user's number of the first step
    points = plan_of(run, "full", -first)
    names = {point.name for point in points}
    for name in names:
        mine = [point for point in points if point.name == name]
        rows = [row for row in held.memlogs_rows() if name in row]
        before = -1
        for row in rows:
            upto = row["memlog/step"]
            window = [point.value for point in mine if before <= point.index <= upto]
            assert row[name] in window, (name, row)
            before = min(point.index for point in mine if point.value == row[name])
        last = max(mine, key=lambda point: (point.index, point.time_us))
        if mine[0].fold == "max":
            assert max(row[name] for row in rows) == max(point.value for point in mine), name
        elif mine[0].fold == "min":
            assert min(row[name] for row in rows) == min(point.value for point in mine), name
        else:
            assert rows[-1][name] == last.value, name
    assert names


EACH = """
    import os

    anywhere = start
    start = lambda **arguments: anywhere(dir=os.getcwd(), **arguments)
    scripts = eval(sys.argv[1])
    for number, script in enumerate(scripts):
        os.mkdir(str(number))
        os.chdir(str(number))
        session = None
        if "--joined" in sys.argv:
            import memlog
            session = memlog.init("wandb", finish_timeout=60)
            step = session.step
        exec(script)
        if session is not None:
            session.finish()
        wandb.finish()
        os.chdir("..")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of all `USERS`, by number, without memlog and with it."""
    folder = tmp_path_factory.mktemp("users")
    scripts = repr([dedent(script) for script in USERS.values()])
    for name, arguments in (("plain", []), ("written", ["--joined"])):
        (folder / name).mkdir()
        child.run(PREAMBLE + EACH, folder / name, scripts, *arguments)
    return folder


@pytest.mark.parametrize("how", USERS)
def test_the_users_rows_are_those_without_memlog(trained: Path, how: str) -> None:
    plain, written = (trained / name / str([*USERS].index(how)) for name in ("plain", "written"))
    without, beside = read_only_run(plain), read_only_run(written)
    assert without.users_rows()
    assert beside.users_rows() == without.users_rows()
    assert len(beside.rows) - len(without.rows) in (0, 1, 2)  # before or after the user's
    assert beside.memlogs_rows()
    assert_values_are_the_plans(beside, recorded(written))
    assert beside.metrics["memory/host/rss_peak_mib"] == {
        "step_metric": "memlog/step",
        "summary": ["max"],
    }
    assert beside.config["memlog/python"]


JUMP = """
    run = start()
    memory, held = [], []
    for s in range(30):
        time.sleep(PAUSE)
        if s == 15:
            held.append(b"x" * (50 * 2**20))
        EARLY
        step()
        LATE
    """


LOG = 'run.log({"loss": s}, step=s)'


@pytest.mark.parametrize(("pause", "logs"), [(0.0, "LATE"), (0.001, "EARLY"), (0.05, "LATE")])
def test_row_k_has_the_memory_of_step_k(tmp_path: Path, pause: float, logs: str) -> None:
    """Steps are fast or slow, and the user logs before or after the optimizer's step."""
    script = JUMP.replace("PAUSE", str(pause)).replace(logs, LOG)
    child.run(PREAMBLE + script.replace("EARLY", "").replace("LATE", ""), tmp_path, "--memlog")
    rows = read_only_run(tmp_path).rows
    assert [(row["_step"], row.get("loss"), row.get("memlog/step")) for row in rows] == [
        (s, s, s) for s in range(30)
    ]
    rss = [row["memory/host/rss_mib"] for row in rows]
    grown = [number for number in range(1, 30) if rss[number] - rss[number - 1] > 40]
    assert grown == [15]


def test_what_the_user_logs_under_a_name_of_memlogs_stays(tmp_path: Path) -> None:
    process = child.start(
        PREAMBLE
        + """
    run = start()
    for s in steps(80):
        run.log({"loss": s}, step=s)
        if s >= 5:
            run.log({"memory/host/rss_mib": -s}, step=s, commit=False)
    """,
        tmp_path,
        "--memlog",
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("you log 'memory/host/rss_mib' yourself") == 1
    rows = read_only_run(tmp_path).rows
    assert [row["memory/host/rss_mib"] for row in rows[5:]] == [-s for s in range(5, 80)]
    assert all(row["memory/host/rss_mib"] > 0 for row in rows[:5])
    assert all("memory/host/rss_peak_mib" in row for row in rows)


def test_a_log_that_raises_leaves_its_values_for_the_next(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    run = start()
    for s in steps(10):
        try:
            run.log({"loss": s, "bad": object() if s == 4 else 1}, step=s)
        except TypeError:
            pass
    """,
        tmp_path,
        "--memlog",
    )
    rows = read_only_run(tmp_path).rows
    assert [row["memlog/step"] for row in rows] == [row["_step"] for row in rows]


def test_the_run_is_as_it_was_when_the_session_has_ended(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    run = start()
    before = set(vars(run))
    for s in steps(5):
        run.log({"loss": s}, step=s)
    session.finish()
    assert set(vars(run)) == before, set(vars(run)) - before
    run.log({"loss": 5}, step=5)
    """,
        tmp_path,
        "--memlog",
    )
    assert [row["_step"] for row in read_only_run(tmp_path).users_rows()] == list(range(6))


def test_a_wandb_that_makes_rows_otherwise_is_left_alone(tmp_path: Path) -> None:
    process = child.start(
        """
    from wandb.sdk.wandb_run import Run
    known = Run._partial_history_callback
    Run._partial_history_callback = lambda run, *, row, at: known(run, row, at)
    Run._log = lambda run, data, step, commit: run._partial_history_callback(row=data, at=step)
    """
        + PREAMBLE
        + """
    run = start()
    for s in steps(5):
        run.log({"loss": s}, step=s)
    run.finish()
    session.finish()
    """,
        tmp_path,
        "--memlog",
    )
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    made = read_only_run(tmp_path)
    assert [(row["_step"], row["loss"]) for row in made.users_rows()] == [(s, s) for s in range(5)]
    assert made.memlogs_rows() == []
    assert "memlog can't add values to rows" in errors
    assert f"memlog sync {recorded(tmp_path).id}` delivers the whole series" in errors


def test_alerts_and_files_reach_the_users_run(tmp_path: Path) -> None:
    child.run(
        PREAMBLE
        + """
    from pathlib import Path
    from memlog.events import Alert, now_us

    run = start()
    Path("notes.txt").write_text("hello")
    for s in steps(50):
        run.log({"loss": s}, step=s)
    session.publish(Alert(now_us(), 7, "warning", "host.rss > 1 GiB", "t" * 100, "text"))
    session.save_artifact("notes.txt", "report")
    """,
        tmp_path,
        "--memlog",
    )
    held = read_only_run(tmp_path)
    assert [(alert["level"], len(alert["title"])) for alert in held.alerts] == [("WARN", 64)]
    kept = [artifact for artifact in held.artifacts if "notes.txt" in artifact["files"]]
    assert [Path(next(iter(a["files"].values()))).read_text() for a in kept] == ["hello"]
