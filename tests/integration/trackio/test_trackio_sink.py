"""Trackio's integration in a user's programs: with a real server, with a folder, and in killed programs."""

import json
import os
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import child
from support.trackio_server import TOKEN, TrackioServer, offline, rows_of
from support.truth import plan_of

from memlog.journal import RunDirectory, find_run

pytestmark = pytest.mark.integration

TRIALS = """
    import trackio

    import memlog

    session = memlog.init("trackio", dir="runs", alerts=["host.rss > 1 MiB"], finish_timeout=60)
    for trial in range(2):
        run = trackio.init(project="p", name=f"trial {trial}", config={"lr": 0.1}, auto_log_cpu=False)
        print("id", run.id, flush=True)
        for step in range(20):
            session.step()
            trackio.log({"loss": step / 2}, step=step)
        open("note.txt", "w").write(f"trial {trial}")
        session.save_artifact("note.txt", "file")
        trackio.finish()
    memlog.finish()
"""

KILLED = """
    import time

    import trackio

    import memlog

    session = memlog.init("trackio", dir="runs")
    run = trackio.init(project="killed", auto_log_cpu=False)
    print("id", run.id, flush=True)
    while True:
        session.step()
        print(session._live._helper.pid, flush=True)
        time.sleep(0.005)
"""


def memlogs(logs: list[dict[str, Any]]) -> "Counter[tuple[str, int, float]]":
    return Counter(rows_of(logs))


def planned(run: RunDirectory) -> "Counter[tuple[str, int, float]]":
    return Counter((point.name, point.index, point.value) for point in plan_of(run))


def test_each_run_has_its_memory_beside_its_rows(tmp_path: Path, server: TrackioServer) -> None:
    address = f"{server.url}?write_token={TOKEN}"  # as Trackio prints it
    environment = offline(TRACKIO_DIR=str(tmp_path / "client"), TRACKIO_SERVER_URL=address)
    printed = child.run(TRIALS, tmp_path, **environment)
    ids = [line.split()[1] for line in printed.splitlines() if line.startswith("id ")]
    records = server.ask("get_runs_for_project", project="p")
    assert sorted(record["id"] for record in records) == sorted(ids)
    for trial, run_id in enumerate(ids):
        logs = server.ask("get_logs", project="p", run_id=run_id)
        losses = [(log["step"], log["loss"]) for log in logs if "loss" in log]
        assert losses == [(step, step / 2) for step in range(20)]
        rows = memlogs(logs)
        assert set(rows.values()) == {1}
        steps = sorted(step for name, step, _ in rows if name == "memory/host/rss_mib")
        assert steps == list(range(20))
        config = server.ask("get_run_configs", project="p")[run_id]
        assert config["lr"] == 0.1
        assert "memlog/status" not in config
        known = server.ask("get_alerts", project="p", run_id=run_id)
        assert [alert["level"] for alert in known] == (["warn"] if trial == 0 else [])
    run = find_run(tmp_path / "runs", "latest")
    options = ("--backend", "trackio", "--kind", "file", "-o", "out", "--dir", "runs")
    child.memlog("pull", run.id, *options, directory=tmp_path, **environment)
    fetched = sorted(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "trial 1" in fetched
    kept = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if TOKEN.encode() in path.read_bytes()] == []


def test_a_killed_run_is_complete_once_however_often_it_is_synced(tmp_path: Path) -> None:
    environment = offline(TRACKIO_DIR=str(tmp_path / "user" / "trackio"))
    (tmp_path / "user").mkdir()
    process = child.start(KILLED, tmp_path, **environment)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    run_id = next(line.split()[1] for line in lines if line.startswith("id "))
    helper = int(next(lines))
    deadline = time.monotonic() + 60
    while not memlogs(logs_in(tmp_path, run_id)):
        next(lines)
        assert time.monotonic() < deadline
    for pid in (helper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    run = find_run(tmp_path / "runs", "latest")
    state = run.delivery / "trackio.json"
    before = state.read_bytes() if state.exists() else None
    for attempt in range(2):
        if attempt == 1:  # as if the helper had died before it could save what it had sent
            state.unlink() if before is None else state.write_bytes(before)
        child.memlog("sync", run.id, "--dir", "runs", directory=tmp_path, **environment)
        assert memlogs(logs_in(tmp_path, run_id)) == planned(run)


def logs_in(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run in the user's folder, read without trackio, which knows one folder a process."""
    file = folder / "user" / "trackio" / "killed.db"
    if not file.exists():
        return []
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            found = database.execute(
                "SELECT step, metrics FROM metrics WHERE run_id = ?", (run_id,)
            ).fetchall()
        except sqlite3.OperationalError:
            return []
    return [{**json.loads(metrics), "step": step} for step, metrics in found]


def test_on_a_network_file_system_rows_wait_in_trackios_inbox(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio import fragments, server

    from memlog.sink import Connection, Target
    from memlog.testing.made import points
    from memlog_trackio import backend
    from memlog_trackio.addresses import in_folder

    folder = disk / "user" / "cache" / "huggingface" / "trackio"
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    connection = Connection(in_folder(folder), {"TRACKIO_DIR": str(folder)})
    for _ in range(2):
        sink = backend.open_sink(Target("r", None, project="inbox", connection=connection))
        run = sink.open()
        sink.log_points(points(5))
    assert server.get_logs("inbox", run_id=run.run_id) == []
    fragments.import_inbox_dir()
    held = memlogs(server.get_logs("inbox", run_id=run.run_id))
    assert held == Counter((point.name, point.index, point.value) for point in points(5))
