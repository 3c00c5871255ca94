"""Restart a helper process that ended too early, and print a warning with the cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper import protocol
from memlog.delivery.helper.client import HelperProcess
from memlog.delivery.helper.requests import RequestReader

if TYPE_CHECKING:
    from memlog.delivery.helper.alert_pipe import AlertListener

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
        self._waits = threading.Event()
        self._waiting: threading.Thread | None = None
        self._starts = 0
        self.requests: RequestReader | None = None
        self.changed = self.is_away = False

    def start(self, begin: protocol.Begin, listener: AlertListener | None) -> None:
        """Start the helper. Raise only exceptions from the user's own signal handlers."""
        self._begin, self._listener = begin, listener
        self.current.start(self._first_message(), listener, self._on_pipe_closed)

    def start_unless(
        self,
        is_helped: Callable[[], bool],
        within: float,
        begin: protocol.Begin,
        listener: AlertListener | None,
    ) -> None:
        """After at most ``within`` seconds, start a helper if no other rank's helper serves this run.

        ``is_helped`` returns whether a helper serves the run. A thread waits, so the call returns at once.
        """
        self._begin, self._listener = begin, listener
        if listener is not None:
            listener.close()

        def wait_and_start() -> None:
            with self._diagnostics.contained("starting the helper process"):
                self._waits.wait(within)
                if not (self._over.is_set() or is_helped()):
                    self._replace()

        with self._diagnostics.contained("starting the helper process"):
            self._waiting = threading.Thread(
                target=wait_and_start, name="memlog-helper", daemon=True
            )
            self._waiting.start()

    def wait_no_longer(self, join: float = 0.0) -> None:
        """Let the thread of `start_unless` decide now whether to start a helper.

        Wait at most ``join`` seconds for the thread to end.
        """
        self._waits.set()
        if self._waiting is not None:
            self._waiting.join(join)

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
            if not (self.is_away or self._over.is_set()) and self.current.has_ended_early:
                self.changed = self.is_away = True
                self._handle_early_end()
            changed, self.changed = self.changed, False
        return changed

    def look_at_last(self) -> None:
        """At the end of the run, report an early end of the helper. Start no other helper."""
        with self._lock:
            self._over.set()
            if not self.is_away and self.current.has_ended_early:
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
