"""Find out when and how a training process ended, from another process."""

from __future__ import annotations

import os
import select
import signal
import struct
import threading
from pathlib import Path

from memlog.events import Exit, now_us

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
