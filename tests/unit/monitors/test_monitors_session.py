"""Monitors with a real session: the journal's contents, and no double counting."""

import contextlib
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.events import recorded

import memlog
from memlog.events import Alert, Batch, Epoch, Evaluation, Loss, Parameters, Recorded, Scope


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    monkeypatch.delenv("MEMLOG_BACKEND", raising=False)
    monkeypatch.delenv("MEMLOG_ENABLED", raising=False)
    yield tmp_path
    memlog.finish()


class Training:
    """A PyTorch loop that uses only a monitor of memlog."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(2, 4)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss

    def epochs(self, monitor: memlog.EpochMemoryMonitor, epochs: int, batches: int) -> None:
        for _ in range(epochs):
            monitor.on_epoch_start()
            for index in range(batches):
                monitor.on_batch_end(index, self.step())
            monitor.on_epoch_end()


@pytest.mark.parametrize("made_before_init", [True, False])
def test_steps_are_counted_once_and_losses_bear_their_numbers(made_before_init: bool) -> None:
    before = memlog.EpochMemoryMonitor()
    session = memlog.init("local")
    Training().epochs(before if made_before_init else memlog.EpochMemoryMonitor(), 2, 3)
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == list(range(6))
    assert [event.step for event in recorded(session, Loss)] == list(range(6))
    assert [(e.epoch, e.step) for e in recorded(session, Epoch)] == [(0, 2), (1, 5)]
    assert len(recorded(session, Parameters)) == 1


def test_a_monitor_that_comes_in_mid_run_goes_on_at_the_same_step() -> None:
    session, training = memlog.init("local"), Training()
    for _ in range(2):
        training.step()
    monitor = memlog.EpochMemoryMonitor()
    for index in range(3):
        monitor.on_batch_end(index, training.step())
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == list(range(5))
    assert [event.step for event in recorded(session, Loss)] == [2, 3, 4]


def test_every_and_initial_step_hold_for_monitors_too() -> None:
    session = memlog.init("local", every=2, initial_step=10)
    Training().epochs(memlog.EpochMemoryMonitor(), 1, 4)
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == [10, 12]
    assert [event.step for event in recorded(session, Loss)] == [10, 12]


def test_two_sessions_with_one_monitor_keep_apart() -> None:
    monitor, training = memlog.EpochMemoryMonitor(), Training()
    watched = memlog.watch_loss(lambda: 1.0)
    for _ in range(2):
        with memlog.init("local") as session:
            training.epochs(monitor, 1, 2)
            watched()
        assert [event.step for event in recorded(session, Batch)] == [0, 1]
        assert [event.epoch for event in recorded(session, Epoch)] == [0]
        assert [event.evaluation for event in recorded(session, Evaluation)] == [0]


def test_everything_is_in_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    with memlog.init("local") as session:
        memlog.MemoryMonitor.print_memory_usage("After loading: ")
        memlog.MemoryTracker().record("tracked")
        memlog.BatchMemoryProfiler().checkpoint("start")
        with memlog.track_memory("block", print_output=False):
            pass
        for watched in (memlog.watch_loss(lambda: 0.5), memlog.watch_loss(lambda: 1 / 0)):
            with contextlib.suppress(ZeroDivisionError):
                watched()
    labels = [event.label for event in recorded(session, Recorded)]
    assert labels == ["After loading", "tracked", "start"]
    (block,) = recorded(session, Scope)
    assert (block.label, block.error) == ("block", None)
    found = [(e.evaluation, e.value, e.error) for e in recorded(session, Evaluation)]
    assert found == [(0, 0.5, None), (1, None, "ZeroDivisionError")]
    assert all(e.rss > 2**24 for e in recorded(session, Evaluation))
    assert "After loading: CPU: " in capsys.readouterr().out


def test_batches_are_announced_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    memlog.init("local", config={"memory_monitor_batches": 2})
    Training().epochs(memlog.EpochMemoryMonitor(verbose_batches=2), 1, 3)
    memlog.finish()
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    announced = "Memory monitoring enabled (verbose for first 2 batches)"
    assert lines == [announced, "", "  Batch 0", "  Batch 1", "  Epoch end"]


def test_a_run_of_evaluations_alone_is_not_called_empty(caplog: pytest.LogCaptureFixture) -> None:
    with memlog.init("local") as session:
        memlog.watch_loss(lambda: 1.0)()
    assert len(recorded(session, Parameters)) == 1
    assert caplog.messages == []


def test_errors_inside_a_monitor_are_counted_in_the_runs_health() -> None:
    class Odd:
        @property
        def loss(self) -> float:
            raise RuntimeError("no")

    with memlog.init("local") as session:
        memlog.watch_loss(Odd)()
    assert session.health.faults == {"reading a loss: RuntimeError": 1}


@pytest.mark.seed(102, 155)
def test_disabled_monitors_print_and_record_nothing(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    def everything(monitor: memlog.EpochMemoryMonitor, profiler: Any) -> None:
        monitor.on_epoch_start()
        monitor.on_batch_end(0, 1.0)
        monitor.on_epoch_end()
        profiler.checkpoint("a")
        profiler.checkpoint("b")
        profiler.print_summary()

    everything(memlog.EpochMemoryMonitor(False), memlog.BatchMemoryProfiler(False))
    with memlog.init("local", enabled=False):
        everything(memlog.EpochMemoryMonitor(), memlog.BatchMemoryProfiler())
        memlog.MemoryMonitor.print_memory_usage("x")
        with memlog.track_memory("y"):
            memlog.watch_loss(lambda: 1.0)()
    assert capsys.readouterr().out == ""
    assert list(runs.iterdir()) == []


@pytest.mark.seed(101, 154)
def test_a_disabled_monitor_costs_next_to_nothing() -> None:
    monitor, profiler = memlog.EpochMemoryMonitor(False), memlog.BatchMemoryProfiler(False)
    # Of a loop's own cost nothing is taken off, and the best of many is what a busy machine leaves.
    for call in ("m.on_batch_end(0, 1.0)", "p.checkpoint('a')"):
        names = {"m": monitor, "p": profiler}
        best = min(timeit.repeat(call, globals=names, number=20_000, repeat=15)) / 20_000
        assert best < 0.1e-6


def test_a_disabled_monitor_leaves_the_steps_to_the_optimizer() -> None:
    session = memlog.init("local")
    Training().epochs(memlog.EpochMemoryMonitor(enabled=False), 1, 3)
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == [0, 1, 2]
    assert recorded(session, Epoch) == []


def test_ctrl_c_during_an_alert_does_not_cross_a_watched_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def pressed(alert: Alert) -> None:
        raise KeyboardInterrupt

    session = memlog.init("local", alerts="host.rss > 1 MiB", on_alert=pressed)
    loss = memlog.watch_loss(lambda x: x * 2, verbose_evaluations=0)
    deadline = time.monotonic() + 60
    while "press it again" not in caplog.text and time.monotonic() < deadline:
        assert loss(3) == 6  # the helper process judges the rule, and a later call runs `pressed`
        time.sleep(0.01)
    assert session.health.dropped["interrupts"] == 1
    memlog.finish()
    assert len(recorded(session, Alert)) == 1


def test_a_second_monitor_does_not_count_the_same_axis(capsys: pytest.CaptureFixture[str]) -> None:
    session = memlog.init("local")
    training, validation = memlog.EpochMemoryMonitor(), memlog.EpochMemoryMonitor()
    loop = Training()
    for _ in range(3):
        loop.epochs(training, 1, 4)
        loop.epochs(validation, 1, 2)
    memlog.finish()
    assert [event.step for event in recorded(session, Batch)] == list(range(12))
    assert [event.step for event in recorded(session, Loss)] == list(range(12))
    assert [(event.epoch, event.step) for event in recorded(session, Epoch)] == [
        (0, 3),
        (1, 7),
        (2, 11),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("  Batch ")]) == 18
    assert len([line for line in lines if line.startswith("  Epoch end: ")]) == 6


def test_another_monitor_counts_when_the_first_is_deleted_or_idle() -> None:
    session = memlog.init("local")
    loop = Training()
    first, second = memlog.EpochMemoryMonitor(), memlog.EpochMemoryMonitor()
    loop.epochs(first, 1, 3)
    loop.epochs(second, 2, 5)  # may be validations
    loop.epochs(second, 1, 2)  # and now it is training that goes on with it
    del second
    loop.epochs(memlog.EpochMemoryMonitor(), 1, 2)
    loop.epochs(first, 1, 5)
    memlog.finish()
    # The last one was made in place and is gone by then: the first counts again.
    assert [event.step for event in recorded(session, Batch)] == list(range(3 + 2 + 2 + 5))
    assert [event.epoch for event in recorded(session, Epoch)] == [0, 1, 2, 3]
