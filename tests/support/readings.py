"""Events with sizes in MiB, for tests of what is printed."""

from memlog.events import DeviceReading, Epoch, Evaluation, PeakSource, Recorded, Scope

MIB = 1024**2


def gpu(
    allocated: float, reserved: float = 0, peak: float = 0, source: PeakSource = "exact"
) -> DeviceReading:
    sizes = (round(allocated * MIB), round(reserved * MIB), round(peak * MIB))
    return DeviceReading("cuda0", *sizes, source, None)


def point(label: str, rss: float, *devices: DeviceReading) -> Recorded:
    return Recorded(1, label, round(rss * MIB), devices)


def epoch(rss: float, peak: float, source: PeakSource, *devices: DeviceReading) -> Epoch:
    return Epoch(1, 0, None, round(rss * MIB), round(peak * MIB), source, devices)


def evaluation(rss: float, *devices: DeviceReading, error: str | None = None) -> Evaluation:
    return Evaluation(1, 0, None, round(rss * MIB), devices, error)


def scope(label: str, change: float, *devices: DeviceReading) -> Scope:
    return Scope(1, label, 1, round(change * MIB), devices)
