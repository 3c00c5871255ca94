"""The training process as its helper process sees it: its messages, whether it lives, and how it ended."""

from __future__ import annotations

import os
import select
import selectors
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from memlog.delivery.helper import protocol
from memlog.delivery.helper.sampler import StepFollower
from memlog.events import Event, Exit, now_us
from memlog.journal import JournalFile, RunDirectory

_REPARENTED_WITHIN = 2.0
"""Maximum seconds to wait until the children of a dead process have another parent."""


class TrainingProcess:
    """The training process of a run.

    ``on_event`` is called with each event of the training process's journal, in order.

    Attributes:
        follower: Reads the training process's journal.
        finish: The training process's last message; ``None`` until it arrives.
    """

    def __init__(
        self, begin: protocol.Begin, run: RunDirectory, on_event: Callable[[Event], object]
    ) -> None:
        self._begin = begin
        file = JournalFile(run.path, f"trainer-{begin.trainer_pid}")
        self.follower = StepFollower(file, on_event)
        self.finish: protocol.Finish | None = None

    @property
    def has_told_its_end(self) -> bool:
        """True if the training process has sent its last message."""
        return self.finish is not None

    @property
    def is_gone(self) -> bool:
        """True if the training process has died."""
        # If the parent dies, the child gets another parent. The training process's number alone
        # proves nothing, because another process can get the same number.
        return os.getppid() != self._begin.trainer_pid

    @property
    def goes_on(self) -> bool:
        """True if the training process still runs and has not reported its end."""
        return not self.is_gone and self.finish is None and self.follower.end is None

    def is_gone_soon(self) -> bool:
        """Wait at most `_REPARENTED_WITHIN` seconds; return whether the training process has died.

        The wait is necessary because `is_gone` checks the parent of this process. If the training
        process dies, its pipe closes before this process gets another parent.
        """
        deadline = time.monotonic() + _REPARENTED_WITHIN
        while not self.is_gone:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True


_STATE = 0
_EXIT_CODE = 49
"""Index of the exit code in ``/proc/PID/stat``, counted after the program's name. `_STATE` is the index of
the process state. In proc_pid_stat(5), these are the fields 52 and 3."""
_GET_INFO = 0xC040FF0B
"""The request ``PIDFD_GET_INFO`` of ioctl(2), with a `_INFO` of 64 bytes."""
_INFO = struct.Struct("<Q52xi")
"""First version of ``struct pidfd_info`` (linux/pidfd.h): its mask and, at its end, the exit status."""
_INFO_EXIT = 1 << 3
"""Bit of the mask for the exit status."""
_SOON = 0.5
"""Maximum seconds that `ExitWatch.result` waits for the exact time of the end. After this
maximum, it returns the present time, without an exit code."""


class ExitWatch:
    """Watch on a live process. A thread sleeps until the process ends, and records the exact time of the end.

    The time must be exact because the rank that ended first is the one that failed. A launcher ends the other
    ranks only a tenth of a second later. The thread works on Linux only. On other systems, `result` returns
    the present time, without an exit code.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: Exit | None = None
        self._thread: threading.Thread | None = None
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return  # not Linux, or the process has ended already
        self._thread = threading.Thread(
            target=self._wait, args=(descriptor,), name="memlog-exit", daemon=True
        )
        self._thread.start()

    def result(self) -> Exit:
        """Return how the process ended. Call it when the process is gone."""
        if self._thread is not None:
            self._thread.join(_SOON)
        return self._seen or Exit(now_us(), None, None)

    def _wait(self, descriptor: int) -> None:
        # `poll`, because `select` can't take a descriptor above 1,023.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        seen_us, status = now_us(), _kept_status(descriptor)
        self._seen = Exit(seen_us, *(_how(self._pid) if status is None else _meaning(status)))
        os.close(descriptor)


def _kept_status(descriptor: int) -> int | None:
    """Return the status of a process that has ended; ``None`` if the kernel keeps none (Linux before 6.15).

    Where it does, the status is known although the parent has waited for the process already, as
    ``torch.multiprocessing.spawn`` does at once.
    """
    import fcntl  # noqa: PLC0415 - missing on Windows

    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, status = _INFO.unpack(info)
    return status if mask & _INFO_EXIT else None


def _how(pid: int) -> tuple[int | None, str | None]:
    """Return a dead process's exit code and signal; both ``None`` if its parent has already waited for it."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        if fields[_STATE] != "Z":
            return None, None  # the number belongs to another process
        return _meaning(int(fields[_EXIT_CODE]))
    except (OSError, ValueError, IndexError):
        return None, None


def _meaning(status: int) -> tuple[int | None, str | None]:
    """Return the exit code, or the name of the signal, in a status of waitpid(2)."""
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status), None
    return None, signal_name(os.WTERMSIG(status))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


TERM_GRACE = 20.0
"""Maximum seconds that the helper goes on after SIGTERM. Schedulers send SIGKILL about 30 s after SIGTERM."""


class LineReader:
    """Reader of whole lines from a pipe, with a time limit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unfinished = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(fd, selectors.EVENT_READ)
        self.open = True

    def read(self, timeout: float | None) -> Iterator[bytes]:
        """Wait at most ``timeout`` seconds for data, and yield the complete lines in it.

        Without a timeout, wait until data arrives or the pipe closes.
        """
        if not self._selector.select(timeout):
            return
        data = os.read(self._fd, 65536)
        if not data:
            self.open = False
            self._selector.unregister(self._fd)
            return
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        yield from lines


class StopTime:
    """Time at which the helper process has to end: `TERM_GRACE` seconds after SIGTERM.

    The helper does not end at once, because the trainer gets SIGTERM too, and may first save its work.
    """

    at: float | None = None

    def set(self, *_: object) -> None:
        """Handle SIGTERM. Only the first signal sets the time."""
        if self.at is None:
            self.at = time.monotonic() + TERM_GRACE

    @property
    def has_come(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


def first_message(lines: LineReader) -> tuple[protocol.Begin, list[bytes]]:
    """Return the trainer's first message, and the lines that arrived with it.

    Raises:
        SystemExit: The first line is no `Begin` message, or the pipe closes before a line arrives.
    """
    while lines.open:
        received = list(lines.read(None))
        if received:
            begin = protocol.decode(received[0])
            if isinstance(begin, protocol.Begin):
                return begin, received[1:]
            break
    raise SystemExit(
        "this is memlog's helper process, which expects its settings on stdin: memlog.init() starts it"
    )
