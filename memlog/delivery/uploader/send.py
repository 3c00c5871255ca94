"""Send points and parameters, and find the points that the tracker refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memlog.delivery.uploader.cursor import Cursor
from memlog.errors import RunRefusedError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import ThreadStep
from memlog.metrics import thread_point
from memlog.sink import Point, Sink

DELIVERED = ""
"""Key of the delivered points in a tally; the other keys are the reasons why points were lost."""


def send_pending(sink: Sink, cursor: Cursor, *, is_content: bool) -> Counter[str]:
    """Send the cursor's pending points and parameters, and remove them from the cursor.

    If ``is_content`` is True, an unknown error while points are sent counts as a refusal of the points. If
    ``is_content`` is False, the error is raised.

    Returns:
        Number of points delivered, and of points lost, by reason.

    Raises:
        RunRefusedError: the run is deleted, or does not exist.
        TrackerUnavailableError: the tracker can't be reached.
    """
    try:
        sink.probe()
    except TrackerRejectedError as error:
        raise RunRefusedError(str(error)) from error
    tally: Counter[str] = Counter()
    tally.subtract(sink.dropped)
    for parameters in cursor.parameters:
        try:
            sink.log_parameters(parameters.values)
        except RunRefusedError:  # noqa: PERF203 - rejected parameters do not stop the others
            raise
        except TrackerRejectedError:
            pass  # the tracker stores the metrics without these parameters
    for begin in range(0, len(cursor.pending), sink.max_points):
        batch = cursor.pending[begin : begin + sink.max_points]
        _send(sink, batch, tally, is_content=is_content)
    cursor.pending, cursor.parameters = [], []
    tally.update(sink.dropped)
    return +tally


def send_thread_steps(sink: Sink, steps: Sequence[ThreadStep], *, is_content: bool) -> Counter[str]:
    """Send the steps of another thread to the thread's own run. See `send_pending`."""
    tally: Counter[str] = Counter()
    for begin in range(0, len(steps), sink.max_points):
        points = [thread_point(step) for step in steps[begin : begin + sink.max_points]]
        _send(sink, points, tally, is_content=is_content)
    return tally


def _send(sink: Sink, points: Sequence[Point], tally: Counter[str], *, is_content: bool) -> None:
    """Send points. If the tracker refuses them, halve them repeatedly to find the points that it refuses."""
    try:
        sink.log_points(points)
        tally[DELIVERED] += len(points)
    except (TrackerUnavailableError, RunRefusedError):
        raise
    except Exception as error:
        if not isinstance(error, TrackerRejectedError) and not is_content:
            raise
        if len(points) == 1:
            tally[f"rejected: {points[0].name}"] += 1
            return
        middle = len(points) // 2
        _send(sink, points[:middle], tally, is_content=is_content)
        _send(sink, points[middle:], tally, is_content=is_content)
