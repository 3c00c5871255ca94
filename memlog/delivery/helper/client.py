"""The helper process as the training process sees it: start, messages, restart after an early end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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
from memlog.delivery.helper.protocol import RequestReader

if TYPE_CHECKING:
    from memlog.delivery.helper.protocol import AlertListener


ARGUMENTS = ("-m", "memlog.delivery.helper")
"""Arguments to the interpreter that start the helper."""
_POLL = 0.02
"""Seconds between checks of whether the helper has ended."""

Outcome: TypeAlias = Literal["delivered", "at work", "unreachable", "dead"]
"""State of the helper when ``finish`` stops waiting.

``delivered``: the helper has delivered the run.
``at work``: the helper still delivers. ``unreachable``: the helper reaches no tracker that still lacks data,
and keeps trying. ``dead``: the helper did not start, or will not deliver the remaining data.
"""

_outliving: list[subprocess.Popen[bytes]] = []
"""Helpers that were still delivering when `HelperProcess.finish` stopped waiting."""


def let_go() -> None:
    """Suppress Python's warning about helpers that still run when this process ends."""
    for process in _outliving:
        if process.poll() is None:
            # `Popen.__del__` warns about a process without a return code.
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
            os.set_blocking(self._pipe.number, False)
            fd = None if listener is None else listener.fd
            shared = [
                descriptor for descriptor in (fd, begin.requests_fd) if descriptor is not None
            ]
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
        if ended_early:  # with any exit code: the helper did not know that the journal is complete
            return "dead"
        begun = time.monotonic()
        while process.poll() is None:
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


PAUSES = (1.0, 10.0, 60.0)
"""Seconds to wait before the helper is started again for the first, the second and the third (last) time."""
_REAPED_WITHIN = 5.0
"""Maximum seconds to wait for the end of a helper that has closed its pipe. If the helper ends later, the
training loop's next check of the helper notices the end."""


class SupervisedHelper:
    """The helper process of a run; replaced by a new one if it ends too early.

    The trainer's thread only checks whether the helper lives. A thread of memlog's starts the next helper.
    Each early end and each new start is counted as a fault.

    Attributes:
        current: The helper that runs, or ran last. The training loop polls its process.
        changed: True if the helper has ended, or was started again, since the last call of `look`.
        is_away: True if the helper has ended, and no new one runs yet.
        requests: Memory for the helper's requests; ``None``: the helper can't make any.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.current = HelperProcess(diagnostics)
        self._begin: protocol.Begin
        self._listener: AlertListener | None = None
        self._sent: list[protocol.Message] = []
        # Reentrant: a signal handler may publish, and so call `send`, while its own thread holds the lock.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._starts = 0
        self.requests: RequestReader | None = None
        self.changed = self.is_away = False

    def start(self, begin: protocol.Begin, listener: AlertListener | None) -> None:
        """Start the helper. Raise only exceptions from the user's own signal handlers."""
        self._begin, self._listener = begin, listener
        self.current.start(self._first_message(), listener, self._on_pipe_closed)

    @property
    def pid(self) -> int | None:
        return self.current.pid

    def abandon(self) -> None:
        """Kill the helper of a run that could not begin, so that nothing is delivered."""
        self._over.set()
        with self._lock:
            self.current.abandon()

    def send(self, message: protocol.Message) -> None:
        """Send a message to the current helper, and later to each helper that replaces it. Never block."""
        with self._lock:
            self._sent.append(message)
            if not self.is_away:
                self.current.send(message)

    def look(self) -> bool:
        """Check whether the helper has ended too early. If it has, begin to start the next helper.

        Returns:
            True if the helper has ended, or was started again, since the last call.
        """
        with self._lock:
            if not (self.is_away or self._over.is_set()) and self.current.has_ended:
                self.changed = self.is_away = True
                self._handle_early_end()
            changed, self.changed = self.changed, False
        return changed

    def look_at_last(self) -> None:
        """At the end of the run, report an early end of the helper. Start no other helper."""
        with self._lock:
            self._over.set()
            if not self.is_away and self.current.has_ended:
                self.is_away = True
                _report_end(
                    self.current,
                    "the process tree was not sampled to the end of the run",
                    self._diagnostics,
                )

    def last_helper(self) -> HelperProcess:
        """Return the current helper, so that the caller sends it the run's end. Start no further helper."""
        with self._lock:
            self._over.set()
            return self.current

    def _first_message(self) -> protocol.Begin:
        descriptor = None if self.requests is None else self.requests.descriptor
        return msgspec.structs.replace(self._begin, again=self._starts > 0, requests_fd=descriptor)

    def _on_pipe_closed(self) -> None:
        """Wait for the end of a helper that has closed its pipe, and handle an early end."""
        deadline = time.monotonic() + _REAPED_WITHIN
        while not self._over.is_set():
            # Under the lock: if two threads call `Popen.poll` at once, one can see a dead process as alive.
            with self._lock:
                if self.current.has_ended:
                    break
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)
        if self.look():
            self.changed = True  # `look` cleared this, but the trainer's thread must see it

    def _handle_early_end(self) -> None:
        if self._starts >= len(PAUSES):
            _report_end(self.current, "memlog does not start it again", self._diagnostics)
            _give_up(self._diagnostics)
            return
        _report_end(
            self.current,
            "memlog starts it again; no event is lost, but nothing is delivered or sampled until then",
            self._diagnostics,
        )
        with self._diagnostics.contained("starting the helper process again"):
            threading.Thread(target=self._start_again, name="memlog-helper", daemon=True).start()

    def _start_again(self) -> None:
        """Try to start a helper after each of the remaining `PAUSES`, until a start succeeds."""
        with self._diagnostics.contained("starting the helper process again"):
            for pause in PAUSES[self._starts :]:
                if self._over.wait(pause):
                    return
                self._starts += 1
                if self._replace():
                    return
            _give_up(self._diagnostics)

    def _replace(self) -> bool:
        """Start the next helper; return False if the start failed."""
        helper = HelperProcess(self._diagnostics)
        try:
            listener = None if self._listener is None else self._listener.another()
            helper.start(
                self._first_message(),
                listener,
                self._on_pipe_closed,
            )
            if helper.pid is not None:
                self._install(helper)
        except OSError:  # no pipe could be created, or the new helper has ended at once
            helper.abandon()
            return False
        return helper.pid is not None

    def _install(self, helper: HelperProcess) -> None:
        """Send a new helper all earlier messages, then use it. If the run is over, kill the helper."""
        count = 0
        while not self._over.is_set():
            unsent = self._sent[count:]
            helper.send_all(unsent)
            count += len(unsent)
            # Checked under the lock, because a message that was added meanwhile must be sent first.
            with self._lock:
                if count == len(self._sent) and not self._over.is_set():
                    self.current, self.is_away, self.changed = helper, False, True
                    if self._starts:
                        self._diagnostics.count_fault("the helper process: started again")
                    return
        helper.abandon()


def _report_end(helper: HelperProcess, meaning: str, diagnostics: Diagnostics) -> None:
    """Close the pipe to a helper and count its early end. Print a warning at the first early end."""
    code = helper.close()
    diagnostics.count_fault(f"the helper process: ended ({_cause(code)})")
    diagnostics.say_once("helper", f"the helper process has ended ({_cause(code)}): {meaning}")


def _give_up(diagnostics: Diagnostics) -> None:
    diagnostics.say_once(
        "helper_gone",
        "the helper process has ended again, and memlog does not start it again: events still go to the "
        "journal, but nothing is delivered or sampled while this program runs",
    )


def _cause(code: int) -> str:
    if code == protocol.NO_JOURNAL:
        return "it can't create its file in the run's folder, for example because the disk is full"
    if code >= 0:
        return f"exit code {code}"
    # Imported here to keep `init` fast: only the message about a killed helper needs this module.
    from memlog.delivery.helper.training_process import signal_name  # noqa: PLC0415

    return signal_name(-code)
