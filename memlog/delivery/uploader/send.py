"""Handing points over, and finding those that the tracker refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memlog.delivery.uploader.cursor import Reading
from memlog.errors import RunRefusedError, TrackerRejectedError, TrackerUnavailableError
from memlog.sink import Point, Sink

DELIVERED = ""
"""Beside the reasons for drops in a tally."""


def send_pending(sink: Sink, reading: Reading, *, stubborn: bool) -> Counter[str]:
    """Sends the points and parameters that wait.

    Args:
        sink: Gets them.
        reading: Has them; has none afterwards.
        stubborn: Whatever the tracker raises but that it is away, the content is at fault.

    Returns:
        How many points were delivered, and what was lost, by reason.

    Raises:
        RunRefusedError: the run is deleted or gone.
    """
    try:
        sink.probe()
    except TrackerRejectedError as error:
        raise RunRefusedError(str(error)) from error
    tally: Counter[str] = Counter()
    tally.subtract(sink.dropped)
    for parameters in reading.parameters:
        try:
            sink.log_parameters(parameters.values)
        except RunRefusedError:  # noqa: PERF203 - each costs itself alone
            raise
        except TrackerRejectedError:
            pass  # the metrics are taken all the same
    for begin in range(0, len(reading.pending), sink.max_points):
        batch = reading.pending[begin : begin + sink.max_points]
        _send(sink, batch, tally, stubborn=stubborn)
    reading.pending, reading.parameters = [], []
    tally.update(sink.dropped)
    return +tally


def _send(sink: Sink, points: Sequence[Point], tally: Counter[str], *, stubborn: bool) -> None:
    """Hands points over; where the tracker refuses them, finds those that it refuses."""
    try:
        sink.log_points(points)
        tally[DELIVERED] += len(points)
    except (TrackerUnavailableError, RunRefusedError):
        raise
    except Exception as error:
        if not isinstance(error, TrackerRejectedError) and not stubborn:
            raise
        if len(points) == 1:
            tally[f"rejected: {points[0].name}"] += 1
            return
        middle = len(points) // 2
        _send(sink, points[:middle], tally, stubborn=stubborn)
        _send(sink, points[middle:], tally, stubborn=stubborn)
