"""``init`` to ``finish``: what a training process sees of memlog."""

import contextlib
import copy
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.events import EventT, events_in, recorded
from support.sinks import ListSink, ListTracker

import memlog
from memlog.events import Alert, Batch, End, Health, Loss, Parameters, Run
from memlog.journal import Binding, RunDirectory
from memlog.session.exit import error_at_exit, status_of
from memlog.sink import Target

pytestmark = pytest.mark.usefixtures("runs")


def events(session: memlog.Session, kind: type[EventT]) -> list[EventT]:
    assert session.directory is not None
    return events_in(RunDirectory(session.directory), kind)


def train(steps: int) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def steps(session: memlog.Session) -> list[int]:
    return [event.step for event in events(session, Batch)]


@pytest.mark.seed(245)
def test_an_unchanged_loop_gives_one_event_a_step() -> None:
    session = memlog.init("local", name="n", project="p")
    train(5)
    memlog.finish()
    assert steps(session) == list(range(5))
    [begun] = events(session, Run)
    assert (begun.name, begun.project, begun.backends) == ("n", "p", ("local",))
    batch = events(session, Batch)[0]
    assert batch.rss is not None
    assert 2**24 < batch.rss <= (batch.rss_peak or 0)


def test_threads_that_publish_at_once_lose_nothing_and_keep_their_order() -> None:
    session = memlog.init("local")
    written = [[Loss(step, thread, 0.0) for step in range(500)] for thread in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for own in written:
            pool.submit(lambda own=own: [session.publish(event) for event in own])
    memlog.finish()
    kept = events(session, Loss)
    assert [[event for event in kept if event.step == own[0].step] for own in written] == written


def test_steps_that_threads_report_at_once_have_numbers_of_their_own() -> None:
    session = memlog.init("local")
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(lambda: [session.step() for _ in range(300)])
    finally:
        sys.setswitchinterval(switch)
    memlog.finish()
    assert [batch.step for batch in events(session, Batch)] == list(range(1200))


def test_every_and_initial_step() -> None:
    session = memlog.init("local", every=3, initial_step=100)
    train(7)
    memlog.finish()
    assert steps(session) == [100, 103, 106]


def test_the_steps_that_the_caller_counts_are_the_only_ones() -> None:
    with memlog.init("local") as session:
        session.step()
        train(5)
        session.step()
    assert steps(session) == [0, 1]


def test_a_first_step_by_hand_after_the_optimizers_is_the_same_step() -> None:
    with memlog.init("local") as session:
        for _ in range(3):
            train(1)
            session.step()
    assert steps(session) == [0, 1, 2]


def test_the_model_and_the_versions_are_recorded_once() -> None:
    session = memlog.init("local", model=torch.nn.Linear(3, 2))
    train(3)
    memlog.finish()
    (parameters,) = events(session, Parameters)
    assert parameters.values["torch"] == torch.__version__
    assert parameters.values["devices"] == "cpu"
    assert parameters.values["model_parameters"] == "8"


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (ValueError("no"), "failed"), (KeyboardInterrupt(), "killed")],
)
def test_leaving_the_block_sets_the_status(error: BaseException | None, status: str) -> None:
    session = memlog.init("local")
    with contextlib.suppress(ValueError, KeyboardInterrupt), session:
        if error is not None:
            raise error
    (end,) = events(session, End)
    assert end.status == status


def test_an_error_that_a_shell_has_shown_is_not_that_of_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert status_of(error_at_exit()) == "failed"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert status_of(error_at_exit()) == "finished"


def test_init_again_ends_the_run_before_and_keeps_the_two_apart() -> None:
    first = memlog.init("local")
    train(2)
    second = memlog.init("local")
    train(3)
    memlog.finish()
    memlog.finish()
    assert steps(first) == [0, 1]
    assert steps(second) == [0, 1, 2]
    assert len(events(first, End)) == 1


def test_disabled_installs_nothing_and_does_nothing(runs: Path) -> None:
    from torch.optim import optimizer

    hooks = dict(optimizer._global_optimizer_post_hooks)
    finders = list(sys.meta_path)
    for session in (
        memlog.init("mlflow", enabled=False),
        memlog.init(config={"enable_memory_monitoring": False}),
    ):
        session.step()
        session.publish(End(1, "finished"))
        assert not session.enabled
        assert session.id is None
    assert dict(optimizer._global_optimizer_post_hooks) == hooks
    assert sys.meta_path == finders
    memlog.finish()
    assert list(runs.iterdir()) == []


def test_finish_removes_what_init_installed() -> None:
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_post_hooks)
    memlog.init("local")
    assert dict(optimizer._global_optimizer_post_hooks) != before
    memlog.finish()
    assert dict(optimizer._global_optimizer_post_hooks) == before


def test_memlogs_own_cost_is_recorded() -> None:
    session = memlog.init("local")
    train(20)
    memlog.finish()
    health = events(session, Health)[-1]
    assert health.overhead_ms is not None
    assert health.overhead_ms > 0
    assert health.overhead_total_ms == pytest.approx(health.overhead_ms * 20)


def test_a_sink_of_the_users_own_gets_the_points() -> None:
    tracker = ListTracker()
    sink = ListSink(tracker, Target("mine", None))
    memlog.init(sink)
    train(4)
    memlog.finish()
    points = tracker.all_points()
    assert [p.index for p in points if p.name == "memory/host/rss_mib"] == [0, 1, 2, 3]
    assert tracker.ended == {"own-mine": "finished"}


def test_an_error_inside_a_sink_does_not_reach_training() -> None:
    class Broken(ListSink):
        def probe(self) -> None:
            raise RuntimeError("broken")

    memlog.init(Broken(ListTracker(), Target("mine", None)), finish_timeout=0.1)
    train(3)
    memlog.finish()


def test_the_first_batches_are_printed_where_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    memlog.init("local", config={"memory_monitor_batches": 2})
    train(4)
    memlog.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Memory monitoring enabled (verbose for first 2 batches)", ""]
    assert [line.split(":")[0] for line in lines[2:]] == ["  Batch 0", "  Batch 1"]
    assert lines[2].endswith(" MB")


class Trainer:
    """Trainer of a user, who copies it and keeps it in checkpoints."""

    def __init__(self) -> None:
        self.session = memlog.init("local")
        self.monitor = memlog.EpochMemoryMonitor(verbose_batches=0)

    def epoch(self) -> None:
        self.monitor.on_epoch_start()
        self.monitor.on_batch_end(0, 0.5)
        self.monitor.on_epoch_end()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_trainer_goes_on_recording(copied: Callable[[Trainer], Trainer]) -> None:
    trainer = Trainer()
    trainer.epoch()
    again = copied(trainer)
    assert again.session is trainer.session
    del trainer
    again.epoch()
    again.session.finish()
    assert steps(again.session) == [0, 1]


def test_a_trainer_from_a_checkpoint_names_its_run_and_records_nothing(runs: Path) -> None:
    """The checkpoint is loaded in a worker process, or weeks later."""
    trainer = Trainer()
    trainer.epoch()
    kept = pickle.dumps(trainer)
    loaded: Trainer = pickle.loads(kept)  # noqa: S301 - ours
    assert (loaded.session.id, loaded.session.directory) == (
        trainer.session.id,
        trainer.session.directory,
    )
    assert not loaded.session.enabled
    loaded.session.step()
    assert loaded.session.save_artifact("nothing") is None
    loaded.session.finish("failed")
    trainer.epoch()
    memlog.finish()
    assert steps(trainer.session) == [0, 1]
    assert [event.status for event in events(trainer.session, End)] == ["finished"]
    assert pickle.loads(pickle.dumps(trainer.monitor)).enabled  # noqa: S301 - ours
    assert [path for path in runs.iterdir() if path.is_dir()] == [trainer.session.directory]


def test_its_text_tells_the_run_the_tracker_and_the_state(runs: Path) -> None:
    assert repr(memlog.init(enabled=False)) == "<memlog.Session disabled>"
    with memlog.init("local") as session:
        begun = f"<memlog.Session run {session.id}"
        assert repr(session) == f"{begun}, recording, no step yet>"
        train(1_001)
        assert repr(session) == f"{begun}, recording, step 1,000>"
        assert repr(pickle.loads(pickle.dumps(session))) == f"{begun}, ended>"  # noqa: S301 - its own
        assert session._live is not None
        session._live._journal.bind("mlflow", Binding("0a1b2c", None, "quiet-bear-42"))
    assert repr(session) == f"{begun}, mlflow run 'quiet-bear-42', ended>"
    shutil.rmtree(runs / str(session.id))
    assert repr(session) == f"{begun}, ended>"
    assert session._repr_html_() is None


def test_a_quiet_session_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with memlog.init("local", config={"quiet": True}):
        train(3)
    assert capsys.readouterr().err == ""
    with memlog.init("local") as session:
        train(3)
    first, verdict, last = capsys.readouterr().err.splitlines()
    folder, watch = session.directory, f"`memlog watch {session.id}`"
    assert first == f"memlog: run {session.id} is recorded in {folder}: {watch}"
    assert re.fullmatch(
        r"memlog: Too few steps to judge growth \(3\): .*peak [\d.]+ [MG]iB( of [\d.]+ GiB)?\.",
        verdict,
    )
    assert last == f"memlog: run {session.id}: `memlog show {session.id}`"
    assert "quiet" not in events(session, Run)[0].settings


def test_an_alert_goes_to_the_journal_the_console_and_the_callback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    received: list[Alert] = []

    def on_alert(alert: Alert) -> None:
        received.append(alert)
        raise RuntimeError("the callback's own affair")

    rules = ["error: host.rss > 1 MiB for 3 steps", "host.rss > 8 TiB"]
    session = memlog.init("local", alerts=rules, on_alert=on_alert)
    train(10)
    memlog.finish()
    assert recorded(session, Alert) == received
    [alert] = received
    assert (alert.step, alert.level, alert.rule) == (2, "error", rules[0])
    assert capfd.readouterr().err.count(f"memlog: error: {alert.title} (step 2)\n") == 1
    assert session.health.faults == {"on_alert: RuntimeError": 1}
    assert steps(session) == list(range(10))


def test_the_helper_judges_what_it_samples() -> None:
    config = {"alerts": "host.tree > 1 MiB, host.available < 0.001 KiB", "sample_interval": 0.05}
    session = memlog.init("local", config=config)
    deadline = time.monotonic() + 60
    while not recorded(session, Alert) and time.monotonic() < deadline:
        session.step()
        time.sleep(0.05)
    memlog.finish()
    [alert] = recorded(session, Alert)
    assert alert.rule == "host.tree > 1 MiB"
