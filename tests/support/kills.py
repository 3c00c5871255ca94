"""Trainers that are killed at random moments, and their runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from memlog.events import Batch
from memlog.journal import Header, RunDirectory, find_run
from memlog.journal.format import segment_name
from memlog.metrics import Plan, in_run
from memlog.sink import Point
from support import child
from support.truth import Row, rows_of

NURSERY = """
    import os
    import signal
    import sys

    import mlflow
    from mlflow.tracking.fluent import _active_run_stack

    import memlog

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)   # a child that is killed is gone at once
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])

    def train_busily():
        # Traced steps, while five threads publish, and two compute.
        import threading

        import torch

        from memlog.events import Loss

        def report(thread, number):
            os.write(progress, b"%d %d\\n" % (thread, number))   # only after the call has returned

        def publish(thread):
            number = 0
            while True:
                session._live.publish(Loss(1, number, float(thread)))
                report(thread, number)
                number += 1

        def compute():
            while True:
                sum(range(1_000))

        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"memlog": {"segment_bytes": 65_536}}
        session = memlog.init("local", dir="runs", config=options, model=model, layers=True)
        progress = os.open("progress", os.O_WRONLY)
        os.write(progress, b"%d\\n" % session._live._helper.pid)
        for target in (*(lambda n=n: publish(n) for n in range(1, 6)), compute, compute):
            threading.Thread(target=target, daemon=True).start()
        step = 0
        while True:
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()   # memlog's hook records the step before the call returns
            optimizer.zero_grad()
            report(0, step)
            step += 1

    def train(kind):
        if kind == "busy":
            train_busily()
        options = {"memlog": {"segment_bytes": 4096, "bind_grace": 1000}}
        backend = "local" if kind == "segments" else "mlflow"
        for user in users if kind == "bindings" else ():
            mlflow.start_run(run_id=user, nested=True)
        session = memlog.init(backend, dir="runs", config=options)
        progress = os.open("progress", os.O_WRONLY)
        os.write(progress, b"%d\\n" % session._live._helper.pid)
        step = 0
        while True:
            if kind == "bindings" and step % 8 == 0:
                opened = _active_run_stack.get()   # MLflow's own way would wait for the database
                opened.insert(0, opened.pop())
            session.step()
            os.write(progress, b"%d\\n" % step)   # only after the call has returned
            step += 1

    users = sys.argv[1].split(",")
    if users == ["none"]:   # of busy trainers: import once what each of them needs
        import torch, memlog.session.recording, memlog.tracer.schedule.step_scheduler
    for line in open("wanted"):
        directory, kind = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.chdir(directory)
            train(kind)
        print(pid, flush=True)
"""
"""Script that has imported everything, and forks a trainer for each line of its input."""


class Killed(NamedTuple):
    directory: Path
    run: RunDirectory
    last: int
    """Number of the last step whose call had returned before the kill."""
    returned: list[tuple[int, ...]]
    """Numbers that the trainer reported, in order: a step's number, or a thread's and its event's."""


class Nursery:
    """Process that starts trainers in milliseconds, so that a test can kill many.

    The trainers open ``users``, the ids of runs in the MLflow server at ``uri``, one after the other.
    """

    def __init__(self, directory: Path, uri: str, users: list[str]) -> None:
        os.mkfifo(directory / "wanted")
        self._process = child.start(NURSERY, directory, ",".join(users), MLFLOW_TRACKING_URI=uri)
        self._wanted = (directory / "wanted").open("w")  # `open` waits until the nursery reads

    def kill_one(self, directory: Path, kind: str, seconds: float) -> Killed:
        """Start a trainer, and kill it and its helper ``seconds`` after its first step."""
        directory.mkdir()
        os.mkfifo(directory / "progress")
        assert self._process.stdout is not None
        self._wanted.write(f"{directory} {kind}\n")
        self._wanted.flush()
        trainer = int(self._process.stdout.readline())
        with (directory / "progress").open() as pipe:
            helper, first = int(pipe.readline()), pipe.readline()
            threading.Timer(seconds, os.kill, (trainer, signal.SIGKILL)).start()
            lines = [first, *pipe.readlines()]  # until the trainer is dead
        os.kill(helper, signal.SIGKILL)
        run = find_run(directory / "runs", "latest")
        deadline = time.monotonic() + 30
        while run.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        whole = [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]
        return Killed(directory, run, whole[-1][-1], whole)

    def close(self) -> None:
        self._wanted.close()
        self._process.kill()
        self._process.communicate()


def steps_in(run: RunDirectory) -> list[int]:
    return [
        entry.event.step
        for file in run.files()
        for entry in file.read()
        if isinstance(entry.event, Batch)
    ]


def lines_of_the_newest_segment(run: RunDirectory) -> int:
    """Return the number of whole lines in the newest segment, without its header."""
    [trainer] = run.files("trainer")
    path = run.path / segment_name(trainer.process, max(trainer.segments))
    return max(path.read_bytes().count(b"\n") - 1, 0)


def sync_all(directories: list[Path], directory: Path, uri: str) -> None:
    sync = ("sync", "latest", "--to", "mlflow", "--dir")
    commands = [(*sync, f"{one}/runs") for one in directories]
    child.commands(*commands, directory=directory, MLFLOW_TRACKING_URI=uri)


def rows_by_run(run: RunDirectory, own: str | None) -> dict[str, Counter[Row]]:
    """Points of the plan for a run that is over, by the id of the MLflow run that they belong to.

    ``own`` is the id of memlog's own run, for events that belong to none of the user's runs.
    """
    points: dict[str, list[Point]] = {}
    first = next(
        (found for file in run.files() for h in file.headers() if (found := _bound(h))), own
    )
    for file in run.files():
        plan: Plan[int] = Plan("bucketed")
        target = None
        claims = next((found for h in file.headers() if (found := _bound(h))), first)
        for at, entry in enumerate(file.read()):
            belongs = _bound(entry.header) or claims
            if belongs != target and target is not None:
                points.setdefault(target, []).extend(plan.flush())
                plan = Plan("bucketed")
            target = belongs
            assert target is not None
            binding = entry.header.bindings.get("mlflow")
            event = in_run(entry.event, 0 if binding is None else binding.offset)
            if event is not None:
                points.setdefault(target, []).extend(plan.feed(event, at))
        if target is not None:
            points[target] += plan.flush()
    return {target: rows_of(found) for target, found in points.items() if found}


def _bound(header: Header) -> str | None:
    binding = header.bindings.get("mlflow")
    return None if binding is None else binding.run_id
