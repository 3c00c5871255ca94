"""The peak of a session in one sentence."""

from support.journals import GIB, MIB, at, batch, cuda

from memlog.events import Batch, Device, Evaluation, Trace
from memlog.session.peak_watch import PeakWatch


def test_the_first_step_that_reached_the_peak_is_named() -> None:
    watch = PeakWatch()
    assert watch.sentence(None) is None
    for step, size in enumerate((GIB, 3 * GIB, 2 * GIB, 3 * GIB)):
        watch(batch(step, size))
    assert watch.sentence(None) == "peak 3.0 GiB at step 1"
    assert watch.sentence(12 * GIB) == "peak 3.0 GiB of 12.0 GiB (25%) at step 1"


def test_a_peak_from_before_is_by_that_step() -> None:
    watch = PeakWatch()
    watch(Batch(at(0), 0, GIB, 2 * GIB, "watermark"))
    assert watch.sentence(None) == "peak 2.0 GiB by step 0"


def test_an_accelerator_comes_before_the_process_and_has_its_own_limit() -> None:
    watch = PeakWatch()
    watch(Device(at(0), "cuda1", "NVIDIA H100 80GB HBM3", 80 * GIB))
    watch(batch(0, 90 * GIB, cuda(GIB), cuda(30 * GIB, 40 * GIB, index=1)))
    watch(batch(1, 90 * GIB, cuda(GIB), cuda(30 * GIB, index=1)))
    assert watch.sentence(99 * GIB) == "peak 40.0 GiB of 80.0 GiB (50%) on cuda1 at step 0"


def test_the_largest_trace_tells_what_it_was_made_of() -> None:
    watch = PeakWatch()
    watch(Evaluation(at(0), 3, 0.5, GIB))
    for step, size in ((5, 10), (6, 40), (7, 20)):
        parts = {"parameters": size * MIB // 4, "activations": size * MIB // 2, "other": 1, "x": 0}
        watch(Trace(at(0), step, "dispatch", step != 6, size * MIB, parts, (), None))
    assert watch.sentence(None) == (
        "peak 1.0 GiB at evaluation 3; traced step 6 needed at least 40.0 MiB in tensors: "
        "activations 20.0 MiB, parameters 10.0 MiB, other 1 B"
    )
