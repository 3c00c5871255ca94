"""The trainer's end of the helper process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from memlog import launched
from memlog.delivery import messages
from memlog.delivery.backchannel import AlertListener
from memlog.files import open_to_append
from memlog.health import Health

_POLL = 0.02
"""Seconds between looks at whether the helper has ended."""

Outcome: TypeAlias = Literal["delivered", "at work", "dead"]
"""What has become of a helper when ``finish`` stops waiting: ``dead`` means that it ended too early."""

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
        begin: What the helper is told first.
        health: Counts messages that did not get through.
        listener: Is told of the alerts that the helper raises.
    """

    def __init__(
        self, begin: messages.Begin, health: Health, listener: AlertListener | None = None
    ) -> None:
        self._health = health
        _outliving[:] = [process for process in _outliving if process.poll() is None]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._is_missed = False
        # Training goes on without it, and `memlog sync` delivers what the journal has.
        with health.contained("starting the helper process"):
            shared = () if listener is None else (listener.fd,)
            self._process = _start(Path(begin.run_directory) / "helper.log", shared)
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            self._pipe = self._process.stdin.fileno()
            os.set_blocking(self._pipe, False)
            others = tuple(process.pid for process in _outliving)
            fd = None if listener is None else listener.fd
            self.tell(msgspec.structs.replace(begin, other_helpers=others, alerts_fd=fd))
        if listener is not None:
            listener.start()

    @property
    def pid(self) -> int | None:
        """The helper's process number; ``None`` where it could not be started."""
        return None if self._process is None else self._process.pid

    def look(self) -> None:
        """Counts it where the helper has ended although nobody told it to."""
        if self._process is not None and not self._is_missed and self._process.poll() is not None:
            self._is_missed = True
            self._health.count_fault(f"the helper process: ended with {self._process.returncode}")
            self._health.say_once(
                "helper",
                "the helper process has ended: trackers get the rest by `memlog sync` alone; the journal "
                "is written on",
            )

    def tell(self, message: messages.Message) -> None:
        """Sends a message, or counts that the pipe is full or broken; never blocks."""
        if self._process is None:
            return
        line = messages.encode(message) + b"\n"
        try:
            sent = os.write(self._pipe, line)
        except BrokenPipeError:
            self.look()
            return
        except OSError as error:
            self._health.fault("telling the helper process", error)
            return
        if sent < len(line):
            self._health.fault("telling the helper process", BlockingIOError("its pipe is full"))

    def finish(
        self,
        last_words: messages.Finish,
        timeout: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> Outcome:
        """Tells the helper that the journal is complete; waits until it has delivered everything.

        Args:
            last_words: How the run ended, as its journal says too where its disk is not full.
            timeout: Seconds to wait at most; it goes on by itself after that.
            on_wait: Called now and then with the seconds waited so far.

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
        if outcome == "at work":
            _outliving.append(self._process)
        return outcome

    def _tell_and_wait(
        self,
        process: subprocess.Popen[bytes],
        last_words: messages.Finish,
        timeout: float,
        on_wait: Callable[[float], None] | None,
    ) -> Outcome:
        if process.poll() is None:
            self.tell(last_words)
        if process.stdin is not None:
            process.stdin.close()
        begun = time.monotonic()
        while process.poll() is None:
            waited = time.monotonic() - begun
            if waited >= timeout:
                return "at work"
            if on_wait is not None:
                on_wait(waited)
            time.sleep(min(_POLL, timeout))
        return "delivered" if process.returncode == 0 else "dead"


def _start(log: Path, shared: Sequence[int]) -> subprocess.Popen[bytes]:
    with open_to_append(log.parent, log.name) as output:
        return subprocess.Popen(
            [sys.executable, "-m", "memlog.delivery"],
            stdin=subprocess.PIPE,
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
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in (os.environ.get("PYTHONPATH"), root) if path]
    inherited = {name: value for name, value in os.environ.items() if name != launched.VARIABLE}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
