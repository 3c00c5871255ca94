"""The trainer's end of the helper process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from memlog._internal import launch_options
from memlog._internal.descriptors import Descriptor
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import open_to_append
from memlog.delivery.helper import protocol
from memlog.delivery.helper.alert_pipe import AlertListener

ARGUMENTS = ("-m", "memlog.delivery.helper")
"""The interpreter's, which make it the helper."""
_POLL = 0.02
"""Seconds between looks at whether the helper has ended."""

Outcome: TypeAlias = Literal["delivered", "at work", "stopped", "unreachable", "dead"]
"""State of the helper when ``finish`` stops waiting.

``at work``: it still delivers. ``stopped``: a signal holds it, as was said. ``unreachable``: no tracker that
lacks something takes it; the helper keeps trying. ``dead``: it ended too early.
"""

_outliving: list[subprocess.Popen[bytes]] = []
"""Helpers that were still delivering when their run's ``finish`` stopped waiting."""


def let_go() -> None:
    """At the end of this process: they go on by themselves, and Python need not warn of that."""
    for process in _outliving:
        if process.poll() is None:
            process.returncode = 0


class HelperProcess:
    """Starts the helper and talks to it without ever waiting for it.

    It is a fresh interpreter (never a fork, which would copy the trainer's threads and devices) in a
    session of its own, so that the terminal's Ctrl-C reaches the trainer alone.

    Args:
        diagnostics: Counts messages that did not get through.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Descriptor | None = None

    def start(
        self,
        begin: protocol.Begin,
        listener: AlertListener | None = None,
        on_hang_up: Callable[[], object] = lambda: None,
    ) -> None:
        """Starts it. Never raises, but for what a signal handler of the user's raised meanwhile.

        Args:
            begin: What the helper is told first.
            listener: Is told of the alerts that the helper raises.
            on_hang_up: Called, on the listener's thread, when nothing more can come from the helper.
        """
        diagnostics = self._diagnostics
        _outliving[:] = [process for process in _outliving if process.poll() is None]
        # Training goes on without it, and `memlog sync` delivers what the journal has.
        with diagnostics.contained("starting the helper process"):
            shared = () if listener is None else (listener.fd,)
            theirs, ours = os.pipe()
            self._pipe = Descriptor(ours)
            os.set_blocking(self._pipe.number, False)
            log = Path(begin.run_directory) / "helper.log"
            self._process = _start(log, Descriptor(theirs), shared)
            fd = None if listener is None else listener.fd
            self.tell(msgspec.structs.replace(begin, alerts_fd=fd))
        if listener is not None:
            with diagnostics.contained("listening for the helper process's alerts"):
                listener.start(on_hang_up)

    @property
    def pid(self) -> int | None:
        """The helper's process number; ``None`` where it could not be started."""
        return None if self._process is None else self._process.pid

    def abandon(self) -> None:
        """Ends a helper whose run did not come about: there is nothing that it could deliver."""
        self._hang_up()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _hang_up(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    @property
    def has_ended(self) -> bool:
        """Whether it was started, and has ended."""
        return self._process is not None and self._process.poll() is not None

    def let_go(self) -> int:
        """Gives back what is held of one that has ended; returns its return code."""
        self._hang_up()
        return 0 if self._process is None else self._process.returncode

    def tell(self, message: protocol.Message) -> None:
        """Sends a message, or counts that the pipe is full or broken; never blocks."""
        if self._process is None or self._pipe is None:
            return
        if self._pipe.status() is None:  # this program has closed it, and the helper hears no more
            return
        line = protocol.encode(message) + b"\n"
        try:
            sent = os.write(self._pipe.number, line)
        except BrokenPipeError:  # it has ended, which whoever looks notices
            return
        except OSError as error:
            self._diagnostics.fault("telling the helper process", error)
            return
        if sent < len(line):
            self._diagnostics.fault(
                "telling the helper process", BlockingIOError("its pipe is full")
            )

    def brief(self, told: Sequence[protocol.Message]) -> int:
        """Sends all of these, waiting where the pipe is full: not for the trainer's thread.

        Returns:
            How many they were.

        Raises:
            OSError: it hears no more.
        """
        if self._pipe is not None:
            os.set_blocking(self._pipe.number, True)
            data = b"".join(protocol.encode(message) + b"\n" for message in told)
            while data:
                data = data[os.write(self._pipe.number, data) :]
            os.set_blocking(self._pipe.number, False)
        return len(told)

    def finish(
        self,
        last_words: protocol.Finish,
        timeout: float,
        on_wait: Callable[[float], bool] | None = None,
    ) -> Outcome:
        """Tells the helper that the journal is complete; waits until it has delivered everything.

        Args:
            last_words: How the run ended, as its journal says too where its disk is not full.
            timeout: Seconds to wait at most; it goes on by itself after that.
            on_wait: Called now and then with the seconds waited so far; returns whether waiting is of no
                use because no tracker can be reached.

        Returns:
            What has become of it.
        """
        if self._process is None:
            return "dead"
        try:
            outcome = self._tell_and_wait(self._process, last_words, timeout, on_wait)
        except BaseException:  # Ctrl-C: the helper goes on all the same
            _outliving.append(self._process)
            raise
        if outcome in ("at work", "stopped", "unreachable"):
            _outliving.append(self._process)
        return outcome

    def _tell_and_wait(
        self,
        process: subprocess.Popen[bytes],
        last_words: protocol.Finish,
        timeout: float,
        on_wait: Callable[[float], bool] | None,
    ) -> Outcome:
        early = process.poll() is not None
        if not early:
            self.tell(last_words)
        self._hang_up()
        if early:
            return "dead"  # before it was told that this was all, whatever it thought
        begun = time.monotonic()
        while process.poll() is None:
            waited = time.monotonic() - begun
            if waited >= timeout:
                return "stopped" if self._is_stopped(process.pid) else "at work"
            if on_wait is not None and on_wait(waited):
                return "unreachable"
            time.sleep(min(_POLL, timeout))
        return "delivered" if process.returncode == 0 else "dead"

    def _is_stopped(self, pid: int) -> bool:
        """Whether a signal holds it: then it can neither say so nor make way for ``memlog sync``."""
        stopped = None
        with suppress(OSError, AttributeError):  # macOS has no such call before Python 3.13
            stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if stopped is not None:
            self._diagnostics.say_once(
                "helper_stopped",
                f"the helper process is stopped (by a signal such as SIGSTOP): `kill -CONT {pid}` lets it "
                "go on and deliver what is left",
            )
        return stopped is not None


def _start(log: Path, stdin: Descriptor, shared: Sequence[int]) -> subprocess.Popen[bytes]:
    with closing(stdin), open_to_append(log.parent, log.name) as output:
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
    """The trainer's environment, so that a tracker's client finds its settings and its packages.

    The folder that memlog was imported from comes last on the path: a checkout that was never installed
    works, and nothing in it hides anybody else's module. What ``memlog run`` told the trainer is not the
    helper's business.
    """
    root = str(Path(__file__).resolve().parents[3])
    paths = [path for path in (os.environ.get("PYTHONPATH"), root) if path]
    inherited = {
        name: value for name, value in os.environ.items() if name != launch_options.VARIABLE
    }
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
