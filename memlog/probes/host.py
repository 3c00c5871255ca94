"""Memory of this process, read fast enough for every step, and peaks from marks that other code may reset.

An allocator has one mark for the whole process. Resetting the mark for each window would destroy its value
for all other code, so memlog only reads the mark. Between two readings the mark rose, stayed equal or fell.
`PeakWindow.advance` derives the window's peak in each of these three cases.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.fork import Descriptor
from memlog.events import PeakSource

_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else _KIB
_LEAST_SHARED = 1024**2
"""With fewer bytes of shared memory, the second of `HostReading.spaces` is unknown."""
_SHARED_CHANGED = 1024**2 // _PAGE
"""Minimum change of the number of shared pages (1 MiB of pages) before ``RssShmem`` is read again."""


class HostReading(NamedTuple):
    """Resident set of this process, in bytes; ``None`` if unknown."""

    rss: int | None = None
    rss_peak: int | None = None
    """Its largest size so far."""
    rss_peak_source: PeakSource | None = None
    rss_anon: int | None = None
    """Its part that is neither mapped files nor shared memory."""
    rss_shared: int | None = None
    """Its part that is shared memory."""
    spaces: tuple[int, int | None] | None = None
    """Address space for private data (``VmData``), with pages that were never written; and the rest, if it
    has 1 MiB of shared memory or more. The rest has mapped files, too."""


class HostProbe:
    """Reader of the resident set and its watermark (its largest size so far); safe across ``fork``.

    Whether a peak was reached since the previous reading refers to the probe's own readings. So a caller that
    needs this for both epochs and batches uses two probes. Errors are counted in ``diagnostics`` and never
    raised.
    """

    def __init__(self, diagnostics: Diagnostics, *, proc: Path = Path("/proc")) -> None:
        self._diagnostics = diagnostics
        self._proc = proc
        self._memory: _LinuxMemory | _PortableMemory | None = None
        self._begin()

    def close(self) -> None:
        """Close the files of ``/proc``. From then on, readings are unknown. A second call has no effect."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _begin(self) -> None:
        self._generation = fork.generation
        self._highest = 0
        self._memory = self._open()

    def read(self) -> HostReading:
        """Read the resident set, its peak, and whether the peak was reached since the last call.

        On Linux, this function does all of it without calls of Python functions: most of a step's time for
        memlog is spent in code that is no longer in the processor's caches.
        """
        if fork.generation != self._generation and self._memory is not None:
            # In a forked child, the descriptors still belong to the parent's files in `/proc`.
            self.close()
            self._begin()
        memory, before = self._memory, self._highest
        spaces: tuple[int, int | None] | None = None
        if memory is None:
            return HostReading()
        try:
            if memory.statm is None:
                rss, mark = memory.read()
            else:
                size, resident, shared, _, _, data, _ = os.pread(memory.statm, 128, 0).split()
                rss, pages = int(resident) * _PAGE, int(shared)
                memory.file_pages = pages
                if not -_SHARED_CHANGED < pages - memory.pages_when_read < _SHARED_CHANGED:
                    memory.read_shared()
                # `status` has this figure, too, but takes 8 µs. The resident set consists of anonymous
                # memory, mapped files and shared memory. `shared` counts mapped files and shared memory.
                memory.rss_anon = rss - pages * _PAGE
                private = int(data) * _PAGE
                # Hardly any shared memory can't fill a buffer, and the journal is shorter without the figure.
                has_shared = (memory.rss_shared or 0) >= _LEAST_SHARED
                other = int(size) * _PAGE - private if has_shared else None
                spaces = (private, other) if private else None  # sandboxed kernels write 0
                mark = getrusage(RUSAGE_SELF).ru_maxrss * _KIB
                if mark <= memory.inherited:
                    mark = memory.status_figure(b"VmHWM")
        except Exception as error:  # noqa: BLE001 - an unreadable number must not end training
            # If another thread has ended the run meanwhile, the files are closed.
            if self._memory is not None:
                self._diagnostics.fault("reading the host's memory", error)
            return HostReading()
        source: PeakSource | None = None
        if mark is not None:
            # Nothing resets this mark. But it can fall slightly, because the kernel adds up the counts of the
            # processors inexactly. Without this line, a slight fall would look like a reset.
            if mark < before or mark < rss:
                mark = max(before, rss)
            self._highest = mark
            # As `memlog.probes.host.PeakWindow` says, for a mark that never falls.
            source = "exact" if mark > before > 0 else "watermark"
        # Half the time of HostReading(…).
        figures = (rss, mark, source, memory.rss_anon, memory.rss_shared, spaces)
        return tuple.__new__(HostReading, figures)

    @property
    def rss_anon(self) -> int | None:
        """Anonymous bytes (no files, no shared memory) in the last reading; ``None`` if unknown."""
        return None if self._memory is None else self._memory.rss_anon

    @property
    def rss_shared(self) -> int | None:
        """Bytes of shared memory in the resident set at the last reading; ``None`` if unknown."""
        return None if self._memory is None else self._memory.rss_shared

    @property
    def rss_file(self) -> int | None:
        """Bytes of mapped files in the resident set at the last reading; ``None`` if unknown."""
        return None if self._memory is None else self._memory.rss_file

    def _open(self) -> _LinuxMemory | _PortableMemory | None:
        try:
            return _LinuxMemory(self._proc) if sys.platform == "linux" else _PortableMemory()
        except Exception as error:  # noqa: BLE001 - without figures, training goes on
            self._diagnostics.fault("opening the host's memory figures", error)
            return None


class _LinuxMemory:
    """Files and last figures of a `HostProbe` on Linux.

    A process can inherit ``ru_maxrss`` from another program: by ``exec``, or by ``vfork`` (``subprocess``
    uses ``vfork``). ``VmHWM`` is never inherited, but reading ``VmHWM`` takes 8 µs. memlog reads ``VmHWM``
    only while ``ru_maxrss`` still has an inherited value.

    Attributes:
        statm: Descriptor of ``/proc/self/statm``.
        inherited: The value of ``ru_maxrss`` that may be inherited, in bytes.
        file_pages: Number of pages in mapped files and shared memory at the last reading.
        pages_when_read: ``file_pages`` when ``RssShmem`` was read.

    Raises:
        OSError: ``/proc`` can't be read.
    """

    def __init__(self, proc: Path) -> None:
        self._kept: list[Descriptor] = []
        self.file_pages = 0
        self.pages_when_read = -_SHARED_CHANGED
        self.rss_anon: int | None = None
        self.rss_shared: int | None = None
        self.statm = self._keep(proc / "self/statm")
        self._status = self._keep(proc / "self/status")
        # `ru_maxrss` is read before `VmHWM`. If the process grows between the two readings, `VmHWM` is the
        # higher one, and `ru_maxrss` does not look inherited.
        watermark = _max_rss()
        own = self.status_figure(b"VmHWM")
        self.inherited = watermark if own is None or watermark > own else 0

    @property
    def rss_file(self) -> int | None:
        """Bytes in mapped files at the last reading; ``None`` if unknown."""
        if self.rss_shared is None:
            return None
        return max(self.file_pages * _PAGE - self.rss_shared, 0)

    def read_shared(self) -> None:
        self.pages_when_read, self.rss_shared = self.file_pages, self.status_figure(b"RssShmem")

    def close(self) -> None:
        for descriptor in self._kept:
            descriptor.close()

    def _keep(self, path: Path) -> int:
        self._kept.append(Descriptor(os.open(path, os.O_RDONLY)))
        return self._kept[-1].number

    def status_figure(self, name: bytes) -> int | None:
        """Return a figure of the process's status, in bytes; ``None`` if a sandboxed kernel lacks it."""
        # 16 KiB, because the line before the figure is long if the user is in many groups.
        status = os.pread(self._status, 16 * _KIB, 0)
        _, found, rest = status.partition(b"\n%b:" % name)
        return int(rest.split(None, 1)[0]) * _KIB if found else None


class _PortableMemory:
    """Reader for macOS and other systems without ``/proc``. The kinds of memory stay unknown."""

    statm = rss_file = rss_anon = rss_shared = None

    def __init__(self) -> None:
        import psutil  # noqa: PLC0415 - takes 10 ms and more, and Linux does not need it

        self._process = psutil.Process()

    def read(self) -> tuple[int, int | None]:
        return self._process.memory_info().rss, _max_rss()

    def close(self) -> None:
        """Do nothing: this reader holds no resources."""


def _max_rss() -> int:
    return getrusage(RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


class PeakWindow:
    """Peak of each window. A window is the time between two readings of one mark."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._mark: int | None = None

    def advance(
        self, current: int | None, mark: int | None
    ) -> tuple[int | None, PeakSource | None]:
        """End a window with this reading in bytes, and begin the next window.

        Returns:
            The window's peak in bytes and its source; ``(None, None)`` if ``mark`` is ``None``.

            * ``exact``: the mark rose, so the mark is the window's peak.
            * ``watermark``: the mark stayed equal, or this is the first reading. The mark is an upper bound.
            * ``sampled``: the mark fell, because other code reset the mark. The peak before the reset is
              lost. The highest known value of this window is a lower bound.

            memlog can't detect a reset if the mark rises to its old value before the next reading. The
            result is then valid only for the time since the reset.
        """
        if mark is None:
            return None, None
        # The caller can read the two numbers at different moments, so `current` can be above `mark`.
        if current is not None and current > mark:
            mark = current
        opening, before = self._current, self._mark
        self._current, self._mark = current, mark
        if before is None or mark == before:
            return mark, "watermark"
        if mark > before:
            return mark, "exact"
        return max(mark, opening or 0), "sampled"
