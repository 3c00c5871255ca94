"""Memory of this process, read fast enough for every step, and figures of its allocators.

An allocator has one mark for the whole process. Resetting the mark for each window would destroy its value
for all other code, so memlog only reads the mark. Between two readings the mark rose, stayed equal or fell.
`PeakWindow.advance` derives the window's peak in each of these three cases.

Python collects garbage after every few hundred new objects, however large these objects are. So memory can
grow for a hundred steps and then fall. Garbage that has survived two collections waits for a full collection.
If each step makes few objects, no full collection comes for thousands of steps. The C library can keep the
memory that a collection frees. So this module reads the C library's figures and not the resident set.

Garbage can hold memory of a device, too. The device's allocator reports it as given out until the collection.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import Descriptor
from memlog.events import PeakSource
from memlog.torchside.loaded import allocator_settings_of, records_history

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
        self._generation = processes.generation
        self._highest = 0
        self._memory = self._open()

    def read(self) -> HostReading:  # noqa: C901 - one function, because each call adds to every step
        """Read the resident set, its peak, and whether the peak was reached since the last call.

        On Linux, this function does all of it without calls of Python functions: most of a step's time for
        memlog is spent in code that is no longer in the processor's caches. In most steps, the kernel's text
        and the peak are those of the step before, and so is the result.
        """
        if processes.generation != self._generation and self._memory is not None:
            # In a forked child, the descriptors still belong to the parent's files in `/proc`.
            self.close()
            self._begin()
        memory, before = self._memory, self._highest
        spaces: tuple[int, int | None] | None = None
        text, largest = b"", 0
        if memory is None:
            return HostReading()
        try:
            if memory.statm is None:
                rss, mark = memory.read()
            else:
                text = os.pread(memory.statm, 128, 0)
                largest = getrusage(RUSAGE_SELF).ru_maxrss
                known_text, known_largest, reading = memory.known
                if text == known_text and largest == known_largest:
                    return reading
                size, resident, shared, _, _, data, _ = text.split()
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
                mark = largest * _KIB
                if mark <= memory.inherited:
                    mark = memory.status_figure(b"VmHWM")
                    text = b""  # that figure can rise beside an equal text
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
            # As `memlog.probes.process.PeakWindow` says, for a mark that never falls.
            source = "exact" if mark > before > 0 else "watermark"
        # Half the time of HostReading(…).
        figures = (rss, mark, source, memory.rss_anon, memory.rss_shared, spaces)
        reading = tuple.__new__(HostReading, figures)
        if text:
            again = (
                reading if source == "watermark" else reading._replace(rss_peak_source="watermark")
            )
            memory.known = text, largest, again  # in one assignment: another thread may read, too
        return reading

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
        known: Text of ``statm`` and value of ``ru_maxrss`` at the last reading, and the reading that follows
            from the same values.

    Raises:
        OSError: ``/proc`` can't be read.
    """

    def __init__(self, proc: Path) -> None:
        self._kept: list[Descriptor] = []
        self.file_pages = 0
        self.pages_when_read = -_SHARED_CHANGED
        self.rss_anon: int | None = None
        self.rss_shared: int | None = None
        self.known: tuple[bytes, int, HostReading] = b"", 0, HostReading()
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
    known = b"", 0, HostReading()

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


class Heap(NamedTuple):
    """Heap of this process, over all arenas, in bytes."""

    in_use: int
    """Bytes allocated, including mapped blocks."""
    idle: int
    """Free bytes that the allocator keeps."""


class _MallocInfo(ctypes.Structure):
    """Result of ``mallinfo2(3)``, in glibc 2.33 and later."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def read_heap() -> Heap | None:
    """Read the allocator's figures; ``None`` if the C library has none."""
    with suppress(AttributeError, OSError):
        mallinfo: Any = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallocInfo
        info = mallinfo()
        return Heap(int(info.uordblks + info.hblkhd), int(info.fordblks))
    return None


def read_sqlite_bytes() -> int:
    """Return the bytes that SQLite has allocated; 0 if the process doesn't use it, or they are unknown."""
    module = sys.modules.get("_sqlite3")
    if module is None:
        return 0
    with suppress(AttributeError, OSError):
        # The extension is linked with the library, so its symbols are found through it.
        library: Any = ctypes.CDLL(getattr(module, "__file__", None))
        used = library.sqlite3_memory_used
        used.restype = ctypes.c_int64
        return int(used())
    return 0


class PinnedSizes(NamedTuple):
    """Pinned memory of this process, in bytes."""

    held: int
    """Bytes in blocks in use and in freed blocks, which the allocator keeps for later requests."""
    in_use: int
    peak: int
    """Highest ``held`` since the process began, or since other code last reset this statistic."""


def read_pinned() -> PinnedSizes | None:
    """Return the pinned memory that torch holds; ``None`` if unknown, or if CUDA is not initialised.

    A call takes about 5 µs. Memory that a program locks in another way does not count.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    read = getattr(cuda, "host_memory_stats_as_nested_dict", None)  # torch before 2.7 lacks it
    stats = {} if read is None else read()
    if "reserved_bytes" in stats:  # older versions, in which ``allocated_bytes`` are those in use
        held, in_use = stats["reserved_bytes"], stats["allocated_bytes"]
    elif "active_bytes" in stats:
        held, in_use = stats["allocated_bytes"], stats["active_bytes"]
    else:
        return None
    return PinnedSizes(int(held["current"]), int(in_use["current"]), int(held["peak"]))


def allocator_settings(torch: Any) -> str:
    """Return the allocator's settings, as in the variable ``PYTORCH_ALLOC_CONF``; empty: the defaults.

    Older versions of torch have no function that returns the settings. With those, return the variable.
    """
    settings = allocator_settings_of(torch)
    if settings is not None:
        return settings
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


def has_expandable_segments(settings: str | None) -> bool:
    """Return True if the settings turn on expandable segments. ``None``: unknown settings."""
    return "expandable_segments:True" in (settings or "")


def segments_without_history(torch: Any) -> list[Mapping[str, Any]] | None:
    """Return the segments of all CUDA devices; ``None`` if reading them could take long.

    A recorded history can have millions of entries. Older versions of torch copy it with the segments.
    """
    memory_snapshot = torch.cuda.memory.memory_snapshot
    if "include_traces" in inspect.signature(memory_snapshot).parameters:
        found: list[Mapping[str, Any]] = memory_snapshot(include_traces=False)
        return found
    return None if records_history(torch) else memory_snapshot()


_EXPLAINS = 0.25
"""If the collected garbage is less than this fraction of a growth, it is not the growth's cause."""


class Collection(NamedTuple):
    """Result of collecting garbage, in bytes."""

    freed: int
    left: int
    """Bytes that are still in use after the collection."""

    def explains(self, rise: float) -> bool:
        """Return whether the garbage may be the cause of a growth by ``rise`` bytes."""
        return self.freed >= _EXPLAINS * rise


def heap_in_use() -> int | None:
    """Return the bytes of the C library's heap that are in use; ``None`` if the library does not tell."""
    heap = read_heap()
    return None if heap is None else heap.in_use


def device_in_use(name: str) -> int | None:
    """Return the bytes that tensors hold on a device, such as ``cuda0``; ``None`` if unknown."""
    kind = name.rstrip("0123456789")
    try:
        module = getattr(sys.modules["torch"], kind)
        if kind == "mps":
            return int(module.current_allocated_memory())
        return int(module.memory_allocated(int(name[len(kind) :])))
    except Exception:  # noqa: BLE001 - a device that can't be read must not end training
        return None


def collect_garbage(
    *, old: bool = False, in_use: Callable[[], int | None] = heap_in_use
) -> Collection | None:
    """Collect garbage now. Return the bytes that were freed, and those still in use.

    Collecting young garbage takes a millisecond. With ``old``, old garbage is collected, too, which takes 0.1
    to 0.3 s for a million objects. ``in_use`` returns the bytes in use, by default of the C library's heap.
    The result is ``None`` if garbage collection is switched off, or if these bytes are unknown.
    """
    if not gc.isenabled():
        return None
    before = in_use()
    gc.collect(2 if old else 1)
    after = in_use()
    if before is None or after is None:
        return None
    return Collection(max(before - after, 0), after)
