"""Client of the helper process, for the training process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from memlog._internal import current_session
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import Descriptor
from memlog._internal.safe_files import open_to_append
from memlog.delivery.helper import protocol

if TYPE_CHECKING:
    from memlog.delivery.helper.alert_pipe import AlertListener

ARGUMENTS = ("-m", "memlog.delivery.helper")
"""Arguments to the interpreter that start the helper."""
_POLL = 0.02
"""Seconds between checks of whether the helper has ended."""

Outcome: TypeAlias = Literal["delivered", "at work", "unreachable", "dead"]
"""State of the helper when ``finish`` stops waiting.

``delivered``: the helper has delivered the run, or handed the run over to another rank's helper.
``at work``: the helper still delivers. ``unreachable``: the helper reaches no tracker that still lacks data,
and keeps trying. ``dead``: the helper did not start, or will not deliver the remaining data.
"""

_outliving: list[subprocess.Popen[bytes]] = []
"""Helpers that were still delivering when `HelperProcess.finish` stopped waiting."""


def let_go() -> None:
    """Suppress Python's warning about helpers that still run when this process ends."""
    for process in _outliving:
        if process.poll() is None:
            process.returncode = 0


class HelperProcess:
    """The helper process of one run. Only `abandon`, `finish` and `send_all` wait for that process.

    The helper is a new interpreter (never a fork, which would copy the trainer's threads and devices). It
    has its own process session, so that the terminal's Ctrl-C reaches only the trainer.

    Attributes:
        process: The process; ``None`` if it could not be started.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.process: subprocess.Popen[bytes] | None = None
        self._pipe: Descriptor | None = None
        self._done: Path | None = None

    def start(
        self,
        begin: protocol.Begin,
        listener: AlertListener | None = None,
        on_closed: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the helper. Raise only exceptions from the user's own signal handlers.

        ``on_closed`` is called, on the listener's thread, when the helper has closed its end of the pipe.
        """
        diagnostics = self._diagnostics
        _outliving[:] = [process for process in _outliving if process.poll() is None]
        # If this fails, training goes on without a helper, and `memlog sync` delivers the journal.
        with diagnostics.contained("starting the helper process"):
            # In one line: an interruption before the descriptors have owners would leave them open.
            theirs, self._pipe = map(Descriptor, os.pipe())
            folder = Path(begin.run_directory)
            self._done = folder / protocol.DONE
            os.set_blocking(self._pipe.number, False)
            fd = None if listener is None else listener.fd
            shared = [each for each in (fd, begin.requests_fd) if each is not None]
            self.process = _start(folder, theirs, shared)
            self.send(msgspec.structs.replace(begin, alerts_fd=fd))
        if listener is not None:
            with diagnostics.contained("listening for the helper process's alerts"):
                listener.start(on_closed)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def abandon(self) -> None:
        """Kill the helper, so that it delivers nothing."""
        self._close_pipe()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    @property
    def has_ended(self) -> bool:
        """True if the helper was started, and has ended."""
        return self.process is not None and self.process.poll() is not None

    @property
    def has_ended_early(self) -> bool:
        """True if the helper has ended without handing its run over to another rank's helper."""
        return self.has_ended and not self.has_handed_over

    @property
    def has_handed_over(self) -> bool:
        return self.process is not None and self.process.returncode == protocol.HANDED_OVER

    def close(self) -> int:
        """Close the pipe to a helper that has ended, and return its return code."""
        self._close_pipe()
        return 0 if self.process is None else self.process.returncode

    def send(self, message: protocol.Message) -> None:
        """Send a message without blocking. If the pipe is full, drop the message and count it as a fault."""
        if self.process is None or self._pipe is None:
            return
        line = protocol.encode(message) + b"\n"
        try:
            sent = os.write(self._pipe.number, line)
        except BrokenPipeError:  # the helper has ended, which `has_ended` shows
            return
        except OSError as error:
            self._diagnostics.fault("sending to the helper process", error)
            return
        if sent < len(line):
            self._diagnostics.fault(
                "sending to the helper process", BlockingIOError("its pipe is full")
            )

    def send_all(self, messages: Sequence[protocol.Message]) -> None:
        """Send several messages, and wait if the pipe is full. Do not call it on the trainer's thread.

        Raises:
            OSError: the helper has closed the pipe.
        """
        if self._pipe is not None:
            os.set_blocking(self._pipe.number, True)
            data = b"".join(protocol.encode(message) + b"\n" for message in messages)
            while data:
                data = data[os.write(self._pipe.number, data) :]
            os.set_blocking(self._pipe.number, False)

    def finish(
        self,
        finish: protocol.Finish,
        timeout: float,
        on_wait: Callable[[float], bool],
    ) -> Outcome:
        """Tell the helper that the journal is complete, and wait until it has delivered everything.

        Args:
            finish: The last message. It contains the run's end, which the journal lacks if the disk was full.
            timeout: Maximum seconds to wait. After these seconds, the helper continues by itself.
            on_wait: Function called repeatedly with the seconds waited so far. It returns True if no tracker
                can be reached. The waiting then ends.
        """
        if self.process is None:
            self._close_pipe()
            return "dead"
        try:
            return self._send_and_wait(self.process, finish, timeout, on_wait)
        finally:  # also after Ctrl-C: the helper continues without this process
            if self.process.poll() is None:
                _outliving.append(self.process)

    def _send_and_wait(
        self,
        process: subprocess.Popen[bytes],
        finish: protocol.Finish,
        timeout: float,
        on_wait: Callable[[float], bool],
    ) -> Outcome:
        ended_early = process.poll() is not None
        if not ended_early:
            self.send(finish)
        self._close_pipe()
        if self.has_handed_over:
            return "delivered"
        if ended_early:  # with any exit code: the helper did not know that the journal is complete
            return "dead"
        begun = time.monotonic()
        while process.poll() is None:
            if self._done is not None and self._done.exists():
                return "delivered" if self._done.read_bytes() == protocol.ALL_DELIVERED else "dead"
            waited = time.monotonic() - begun
            if waited >= timeout:
                return "at work"
            if on_wait(waited):
                return "unreachable"
            time.sleep(min(_POLL, timeout))
        return "delivered" if process.returncode == 0 else "dead"


def _start(folder: Path, stdin: Descriptor, shared: Sequence[int]) -> subprocess.Popen[bytes]:
    with closing(stdin), open_to_append(folder, "helper.log") as output:
        return subprocess.Popen(  # noqa: S603 - constants
            [sys.executable, *ARGUMENTS],
            stdin=stdin.number,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=shared,
            env=_environment(),
        )


def _environment() -> dict[str, str]:
    """Return the helper's environment, a changed copy of the trainer's environment.

    The folder that contains the memlog package is added to ``PYTHONPATH``. So the helper also finds a memlog
    that is not installed, such as a checkout. The folder is the last one, so that it hides no other modules.
    """
    root = str(Path(__file__).resolve().parents[3])
    paths = [path for path in (os.environ.get("PYTHONPATH"), root) if path]
    inherited = {
        name: value for name, value in os.environ.items() if name != current_session.VARIABLE
    }
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
