"""Every printed line is exactly as in the documents of the original monitors."""

import io
import re
import sys

import pytest
from support.readings import MIB, epoch, evaluation, gpu, point, scope

import memlog
from memlog.console import (
    announcement,
    batch_line,
    epoch_line,
    evaluation_lines,
    optimization_line,
    point_line,
    profile_lines,
    scope_lines,
    summary_lines,
)
from memlog.events import Batch, DeviceReading, PeakSource


@pytest.fixture(autouse=True)
def _no_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process may have used the GPU."""
    if "torch" in sys.modules:
        monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: False)


NUMBER = re.compile(r"[+-]?\d+\.\d+ MB")


def batch(rss: float, *devices: DeviceReading) -> Batch:
    return Batch(1, 7, round(rss * MIB), None, None, devices)


@pytest.mark.seed(33)
def test_the_announcement_and_an_empty_line() -> None:
    enabled = "Memory monitoring enabled"
    assert announcement(0) == f"{enabled}\n"
    assert announcement(1) == f"{enabled} (verbose for first batch)\n"
    assert announcement(5) == f"{enabled} (verbose for first 5 batches)\n"


@pytest.mark.seed(34, 35, 46, 52)
def test_a_batch_is_printed_on_one_line() -> None:
    line = batch_line(0, batch(1645.1, gpu(23.1)), "0.014553")
    assert line == "  Batch 0: GPU 23.1 MB, CPU 1645.1 MB, loss=0.014553"
    assert batch_line(1, batch(1645.2)) == "  Batch 1: CPU 1645.2 MB"


@pytest.mark.parametrize(
    ("source", "behind"), [("exact", ""), ("watermark", " (watermark)"), ("sampled", " (sampled)")]
)
@pytest.mark.seed(15, 36, 37)
def test_an_epochs_end_is_printed_with_its_peak(source: PeakSource, behind: str) -> None:
    event = epoch(1645.1, 1702.4, source, gpu(23.1, 3242.0, 2880.3, source))
    line = "  Epoch end: GPU 23.1 MB allocated, 3242.0 MB reserved, peak 2880.3 MB"
    assert epoch_line(event) == line + behind
    line = "  Epoch end: CPU 1645.1 MB, peak 1702.4 MB"
    assert epoch_line(epoch(1645.1, 1702.4, source)) == line + behind


@pytest.mark.seed(38, 41, 47, 52)
def test_a_point_is_printed_on_one_line() -> None:
    line = "After optimization: CPU: 855.8 MB | GPU Allocated: 18.5 MB | GPU Reserved: 22.0 MB"
    assert point_line(point("After optimization: ", 855.8, gpu(18.5, 22.0))) == line
    assert point_line(point("", 855.8)) == "CPU: 855.8 MB | GPU: Not available"
    unknown = DeviceReading("cuda0", None, None, None, None, None)
    line = "CPU: 855.8 MB | GPU Allocated: unknown | GPU Reserved: unknown"
    assert point_line(point("", 855.8, unknown)) == line


@pytest.mark.seed(39, 40, 48, 52)
def test_an_evaluation_is_printed_with_its_loss() -> None:
    event = evaluation(852.1, gpu(18.5, 22.0))
    line = "  Loss evaluation 0: CPU: 852.1 MB | GPU Allocated: 18.5 MB | GPU Reserved: 22.0 MB"
    assert evaluation_lines(0, event, "0.145320").split("\n") == [
        line,
        "    Iteration 1: loss=0.145320",
    ]
    failed = evaluation(852.3, error="ValueError")
    assert evaluation_lines(1, failed).split("\n") == [
        "  Loss evaluation 1: CPU: 852.3 MB | GPU: Not available",
        "    Iteration 2: raised ValueError",
    ]


@pytest.mark.seed(42, 50)
def test_an_optimisation_is_printed_with_its_peak() -> None:
    on_gpu = optimization_line(epoch(1, 1, "exact", gpu(1, 1, 25.3)))
    assert on_gpu == "  Peak GPU memory during optimization: 25.3 MB"
    on_cpu = optimization_line(epoch(850.0, 855.8, "exact"))
    assert on_cpu == "  Peak CPU memory during optimization: 855.8 MB"


@pytest.mark.seed(43, 44)
def test_a_block_is_printed_with_its_change_and_peak() -> None:
    event = scope("loading dataset", 450.2, gpu(1250.5, 1300.0, 1500.2))
    assert scope_lines(event).split("\n") == [
        "[Memory] loading dataset: CPU +450.2 MB, GPU +1250.5 MB",
        "         Peak GPU: 1500.2 MB",
    ]
    assert scope_lines(scope("freeing", -3.25)) == "[Memory] freeing: CPU -3.2 MB"
    assert scope_lines(scope("nothing", -0.001)) == "[Memory] nothing: CPU +0.0 MB"


def test_a_label_with_a_line_break_stays_on_its_line() -> None:
    """Otherwise the label could look like another line of memlog."""
    line = scope_lines(scope("a\nmemlog: b\r\u2028c", 1))
    assert line == "[Memory] a memlog: b  c: CPU +1.0 MB"
    first, second = point("one\ntwo", 1), point("three", 2)
    assert [line.count("one two") for line in summary_lines([first]).split("\n")] == [0, 1]
    assert [line.count("one two") for line in profile_lines([first, second]).split("\n")] == [0, 1]
    assert point_line(first).startswith("one twoCPU")


@pytest.mark.seed(45)
def test_a_profile_is_printed_as_changes_between_points() -> None:
    sizes = {
        "start": 10.1,
        "data_to_gpu": 29.1,
        "forward": 2749.9,
        "backward": 23.1,
        "optimizer": 23.1,
    }
    points = tuple(point(label, 1.0, gpu(size)) for label, size in sizes.items())
    assert profile_lines(points).split("\n") == [
        "    Memory profile:",
        "      start \u2192 data_to_gpu: GPU 29.1 MB (+19.0 MB)",
        "      data_to_gpu \u2192 forward: GPU 2749.9 MB (+2720.8 MB)",
        "      forward \u2192 backward: GPU 23.1 MB (-2726.8 MB)",
        "      backward \u2192 optimizer: GPU 23.1 MB (+0.0 MB)",
    ]
    on_cpu = profile_lines([point("a", 10.0), point("b", 12.5)])
    assert on_cpu.split("\n")[1] == "      a \u2192 b: CPU 12.5 MB (+2.5 MB)"
    first_use = profile_lines([point("a", 10.0), point("b", 12.5, gpu(3.0))])
    assert first_use.split("\n")[1] == "      a \u2192 b: GPU 3.0 MB (+3.0 MB)"
    assert profile_lines([point("a", 10.0)]) == ""


@pytest.mark.seed(9, 11)
def test_a_trackers_points() -> None:
    assert summary_lines([point("a", 1.0), point("b", 2.0)], 3).split("\n") == [
        "Memory summary:",
        "  (3 earlier points are left out)",
        "  a: CPU: 1.0 MB | GPU: Not available",
        "  b: CPU: 2.0 MB | GPU: Not available",
    ]
    assert summary_lines([]) == "Memory summary:\n  (no points were recorded)"


@pytest.mark.seed(12, 13, 14, 15, 16, 55)
def test_an_epoch_monitor_without_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = memlog.EpochMemoryMonitor(verbose_batches=2)
    for _ in range(2):
        monitor.on_epoch_start()
        for index in range(4):
            monitor.on_batch_start(index)
            monitor.on_batch_end(index, 0.25 * index)
        monitor.on_epoch_end()
    monitor.on_batch_end(9)
    lines = NUMBER.sub("N", capsys.readouterr().out).replace(" (watermark)", "").split("\n")
    an_epoch = [
        "  Batch 0: CPU N, loss=0.000000",
        "  Batch 1: CPU N, loss=0.250000",
        "  Epoch end: CPU N, peak N",
    ]
    announced = ["Memory monitoring enabled (verbose for first 2 batches)", ""]
    assert lines == [*announced, *an_epoch, *an_epoch, ""]


@pytest.mark.seed(3, 7, 9, 10, 19, 21, 23)
def test_points_and_profiles_without_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    memlog.MemoryMonitor.print_memory_usage("After model creation: ")
    memlog.MemoryMonitor.print_memory_usage("After it")
    memlog.MemoryMonitor.print_memory_usage()
    tracker = memlog.MemoryTracker()
    tracker.record("initialization")
    tracker.print_summary()
    tracker.clear()
    profiler = memlog.BatchMemoryProfiler()
    profiler.checkpoint("start")
    profiler.checkpoint("forward")
    profiler.print_summary()
    profiler.reset()
    profiler.print_summary()
    assert NUMBER.sub("N", capsys.readouterr().out).splitlines() == [
        "After model creation: CPU: N | GPU: Not available",
        "After it: CPU: N | GPU: Not available",
        "CPU: N | GPU: Not available",
        "Memory summary:",
        "  initialization: CPU: N | GPU: Not available",
        "    Memory profile:",
        "      start \u2192 forward: CPU N (N)",
    ]
    assert tracker.get_peak_memory() == {}


@pytest.mark.seed(4, 5, 6, 8, 24)
def test_the_monitors_static_methods_read_memory_at_once() -> None:
    monitor = memlog.MemoryMonitor
    assert 16 < monitor.get_cpu_memory_mb() < 100_000
    assert monitor.get_gpu_memory_mb() == monitor.get_gpu_memory_reserved_mb("cuda:0") == 0.0
    summary = monitor.get_memory_summary()
    assert list(summary) == ["cpu_memory_mb", "gpu_memory_allocated_mb", "gpu_memory_reserved_mb"]


@pytest.mark.seed(168)
def test_a_usage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="memlog.memory"):
        memlog.MemoryMonitor.log_memory_usage("After loading")
    line = NUMBER.sub("N", caplog.messages[0])
    assert line == "After loading: CPU: N | GPU: Not available"


def test_a_terminal_that_shows_ascii_alone_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    profiler = memlog.BatchMemoryProfiler()
    profiler.checkpoint("start")
    profiler.checkpoint("\u00e4nd")
    profiler.print_summary()
    stream.flush()
    lines = stream.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "    Memory profile:"
    assert lines[1].startswith("      start ? ?nd: ")
