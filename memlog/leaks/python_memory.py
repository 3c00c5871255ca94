"""Lines of the program whose Python memory grows, measured with ``tracemalloc`` for a few steps.

``tracemalloc`` makes Python's allocations two to four times as slow, and a program that hardly does anything
else more than ten times. So memlog starts it only if memlog has found no other cause of the growth. memlog
stops it if its traces exceed `_MOST_TRACED` bytes, or if steps take too long.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import tracemalloc
import weakref
from collections import defaultdict
from typing import Final, NamedTuple

from memlog._internal import fork
from memlog._internal.units import MIB, format_bytes
from memlog.leaks.assignment_lines import replaced, shown
from memlog.leaks.frame_variables import MEMLOG
from memlog.leaks.holders import Holder
from memlog.tracer.attribution.calling_lines import CallingLines

_FRAMES: Final = 8
"""Number of frames that ``tracemalloc`` stores for each allocation. The program's line is usually among
them."""
_LEAST: Final = 64.0
"""Bytes per step. A line whose memory grows less is not reported."""
_MOST_TRACED: Final = 6 * MIB
"""Maximum bytes that ``tracemalloc`` itself uses at the end of a step. If it uses more, the trace ends. This
maximum is enough for about 30,000 allocations. To read them takes 0.5 s."""
_MOST_IN_STEP: Final = 64 * MIB
"""Maximum bytes that ``tracemalloc`` itself uses within a step. If it uses more, the trace ends within the
step."""
_LOOK: Final = 0.02
"""Seconds between two checks of the memory that ``tracemalloc`` itself uses."""


class _Line(NamedTuple):
    file: str
    line: int


class AllocationTrace:
    """Trace of Python's allocations over some steps.

    The bytes that each line holds are counted half-way and at the end. A line grows if it holds more bytes at
    the end.

    ``step_seconds`` is the usual processor time of a step. If the steps together take ``seconds`` more than
    that, the trace ends, also within a step.
    """

    def __init__(self, step_seconds: float = math.inf, seconds: float = math.inf) -> None:
        self._step_seconds, self._seconds = step_seconds, seconds
        self._began = 0.0
        self._steps = 1
        self._started = False
        self._middle: dict[_Line, int] = {}
        self._lines = CallingLines()
        self._start = tracemalloc.start

    def start(self) -> bool:
        """Start tracing, and return True. If the program itself uses ``tracemalloc``, return False."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(_FRAMES)
            self._started = True
            self._began = time.process_time()
            self._start, tracemalloc.start = tracemalloc.start, self._program_starts
            # Without this line, a forked child, such as a DataLoader's worker, would trace until it ends.
            fork.renew(self, "_started", functools.partial(_stop_in_child, weakref.ref(self)))
            # Without this thread, the traces of a step that reads a large file could take as much memory as
            # the file's content.
            threading.Thread(target=self._limit, name="memlog-tracing", daemon=True).start()
        return self._started

    @property
    def running(self) -> bool:
        """True while the trace runs and uses at most `_MOST_TRACED` bytes.

        The trace stops running if the program itself starts or stops tracing.
        """
        tracing = self._started and tracemalloc.is_tracing()
        return tracing and tracemalloc.get_tracemalloc_memory() <= _MOST_TRACED

    def step_ended(self) -> None:
        """Allow the time of another step."""
        self._steps += 1

    @property
    def slower_by(self) -> float:
        """Processor seconds that the steps so far took longer than usual."""
        return time.process_time() - self._began - self._steps * self._step_seconds

    def _limit(self) -> None:
        while (
            self._started
            and tracemalloc.get_tracemalloc_memory() <= _MOST_IN_STEP
            and self.slower_by <= self._seconds
        ):
            time.sleep(_LOOK)
        self.stop()

    def _program_starts(self, nframe: int = 1) -> None:
        """Stop memlog's trace, and start the trace that the program asks for.

        If memlog's trace went on, `stop` would later end the program's trace, too.
        """
        self.stop()
        self._start(nframe)

    def mark_middle(self) -> None:
        """Count the bytes that each line holds. Call this method half-way through the trace."""
        if self._started:
            began = time.process_time()
            self._middle = self._held()
            # The search's own time is not that of slow steps.
            self._began += time.process_time() - began

    def finish(self, steps: int) -> list[Holder]:
        """Stop tracing. Return the lines that hold more bytes than at `mark_middle`, ``steps`` steps ago.

        The line whose memory grows fastest comes first.
        """
        if not self._started:
            return []
        held = self._held()
        self.stop()
        rates = {
            line: min((size - self._middle[line]) / steps, size / steps)
            for line, size in held.items()
            if line in self._middle and size > self._middle[line]
        }
        largest = sorted(rates, key=lambda line: -rates[line])[:3]
        return [_holder(line, rates[line]) for line in largest if rates[line] >= _LEAST]

    def stop(self) -> None:
        """Stop tracing, if this object started it. A second call is harmless."""
        if self._started:
            self._started = False
            if tracemalloc.start == self._program_starts:
                tracemalloc.start = self._start
            tracemalloc.stop()

    def _held(self) -> dict[_Line, int]:
        held: defaultdict[_Line, int] = defaultdict(int)
        # Grouped by traceback first, because each traceback can have thousands of allocations.
        for group in tracemalloc.take_snapshot().statistics("traceback"):
            line = self._program_line(group.traceback)
            if line is not None:
                held[line] += group.size
        return dict(held)

    def _program_line(self, traceback: tracemalloc.Traceback) -> _Line | None:
        """Return the program's innermost line in a traceback; ``None`` if memlog is in the traceback.

        If the program is not in the traceback, return the traceback's innermost line.
        """
        frames = [frame for frame in reversed(traceback) if not frame.filename.startswith(MEMLOG)]
        if not frames or len(frames) < len(traceback):
            return None
        program = (one for one in frames if self._lines.is_program(one.filename))
        frame = next(program, frames[0])
        return _Line(frame.filename, frame.lineno)


def _stop_in_child(trace: weakref.ref[AllocationTrace]) -> bool:
    """Stop the copy of a trace in a forked child. Return the copy's new ``_started``, which is False."""
    copied = trace()
    if copied is not None:
        copied.stop()
    return False


def _holder(line: _Line, rate: float) -> Holder:
    place, size = shown(line.file, line.line), format_bytes(rate)
    name = replaced(line.file, line.line)
    title = f"Python objects made at {place} take {size} more per step."
    remedy = "Look for what keeps the objects that this line makes."
    if name:
        title = f"`{name}` ({place}) is replaced by a larger value in each step, which takes {size} more."
        remedy = "Limit its length, or write the older part to a file."
    return Holder(
        "python_memory",
        title,
        place,
        rate,
        ("tracemalloc: allocated there, and not freed some steps later",),
        "medium",
        remedy,
    )
