"""Steps that make the kept trace outdated because they need far more memory."""

from memlog.events import Batch, DeviceReading, PeakSource
from memlog.tracer.schedule.kept_trace import LargerSteps

MIB = 1024**2


def host(step: int, peak: int, source: PeakSource = "exact") -> Batch:
    return Batch(0, step, 300 * MIB, peak * MIB, source)


def cuda(step: int, peak: int, source: PeakSource = "exact") -> Batch:
    reading = DeviceReading("cuda0", 10 * MIB, 20 * MIB, peak * MIB, source, None)
    return Batch(0, step, 300 * MIB, 9000 * MIB, "exact", (reading,))


def test_a_step_well_above_the_traced_ones() -> None:
    steps = LargerSteps()
    steps(host(0, 400, "watermark"))
    steps.step_was_traced()
    steps(host(1, 430))
    assert not steps.seen  # less than a tenth more
    steps(host(2, 441))
    assert steps.seen
    steps(host(3, 441, "watermark"))
    assert steps.seen
    steps.step_was_traced()
    assert not steps.seen
    steps(host(4, 480))
    assert not steps.seen
    steps(host(5, 486))
    assert steps.seen


def test_a_mark_that_did_not_rise_says_nothing_about_the_step() -> None:
    steps = LargerSteps()
    steps(host(0, 400))
    steps(host(1, 900, "watermark"))
    assert not steps.seen


def test_small_amounts_are_noise() -> None:
    steps = LargerSteps()
    steps(cuda(0, 10))
    steps(cuda(1, 25))
    assert not steps.seen
    steps(cuda(2, 26))
    assert steps.seen


def test_with_a_device_the_process_does_not_count() -> None:
    steps = LargerSteps()
    steps(cuda(0, 100))
    steps(cuda(1, 100, "watermark"))
    assert not steps.seen
