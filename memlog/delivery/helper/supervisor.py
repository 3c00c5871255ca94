"""Keeping the run's helper process going: what ends it too early is said, and it is started again."""

from __future__ import annotations

import signal
import threading
import time

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper import protocol
from memlog.delivery.helper.alert_pipe import AlertListener
from memlog.delivery.helper.client import HelperProcess

PAUSES = (1.0, 10.0, 60.0)
"""Seconds before it is started again: the first time, the second, the last."""
_REAPED_WITHIN = 5.0
"""Seconds in which a process that has closed its pipes has ended."""


class SupervisedHelper:
    """The helper process of a run, and the next where one has ended too early.

    The trainer's thread does no more than look whether it lives: what is to be done then is done by a
    thread of memlog's, which ends with it.

    Args:
        diagnostics: Counts each end, and each start after it.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._helper = HelperProcess(diagnostics)
        self._begin: protocol.Begin
        self._listener: AlertListener | None = None
        self._told: list[protocol.Message] = []
        # A signal handler may publish, and so tell, while its own thread is in here.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._starts = 0
        self._news = False
        self.is_away = False
        """Whether it has ended, and is not there again."""

    def start(self, begin: protocol.Begin, listener: AlertListener | None = None) -> None:
        """Starts it. Never raises, but for what a signal handler of the user's raised meanwhile.

        Args:
            begin: What the helper is told first.
            listener: Is told of the alerts that the helper raises.
        """
        self._begin, self._listener = begin, listener
        self._helper.start(begin, listener, self._hung_up)

    @property
    def pid(self) -> int | None:
        """The helper's process number; ``None`` where it could not be started."""
        return self._helper.pid

    def abandon(self) -> None:
        """Ends a helper whose run did not come about: there is nothing that it could deliver."""
        self._over.set()
        with self._lock:
            self._helper.abandon()

    def tell(self, message: protocol.Message) -> None:
        """Sends a message, to those that may follow, too; never blocks."""
        with self._lock:
            self._told.append(message)
            if not self.is_away:
                self._helper.tell(message)

    def look(self) -> bool:
        """Notices where the helper has ended although nobody told it to, and sees to the next.

        Returns:
            Whether there is news since the last look.
        """
        with self._lock:
            if not (self.is_away or self._over.is_set()) and self._helper.has_ended:
                self._news = self.is_away = True
                self._bury()
            news, self._news = self._news, False
        return news

    def look_at_last(self) -> None:
        """The run is over: like `look`, but for no other that would be started."""
        with self._lock:
            self._over.set()
            if not self.is_away and self._helper.has_ended:
                self.is_away = True
                self._say_it_has_ended("the process tree was not sampled to the end of the run")

    def the_last(self) -> HelperProcess:
        """The one that is to hear of the run's end: whoever is being started is not wanted any more."""
        with self._lock:
            self._over.set()
            return self._helper

    def _hung_up(self) -> None:
        """Nothing more comes from it, which is known before its end is."""
        deadline = time.monotonic() + _REAPED_WITHIN
        while not (self._over.is_set() or self._has_ended()):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)
        if self.look():
            self._news = True  # for the trainer's thread, which publishes it

    def _has_ended(self) -> bool:
        # Of two threads that ask for a process's end at once, `Popen.poll` tells one that it lives.
        with self._lock:
            return self._helper.has_ended

    def _bury(self) -> None:
        if self._starts >= len(PAUSES):
            self._count_end()
            self._give_up()
            return
        self._say_it_has_ended(
            "it is started again; no event is lost, but nothing is delivered or sampled until then"
        )
        with self._diagnostics.contained("starting the helper process again"):
            threading.Thread(target=self._start_again, name="memlog-helper", daemon=True).start()

    def _say_it_has_ended(self, meaning: str) -> None:
        cause = _cause(self._count_end())
        self._diagnostics.say_once("helper", f"the helper process has ended ({cause}): {meaning}")

    def _count_end(self) -> int:
        ended = self._helper.let_go()
        self._diagnostics.count_fault(f"the helper process: ended with {ended}")
        return ended

    def _start_again(self) -> None:
        with self._diagnostics.contained("starting the helper process again"):
            for pause in PAUSES[self._starts :]:
                if self._over.wait(pause):
                    return
                self._starts += 1
                if self._replace():
                    return
            self._give_up()

    def _replace(self) -> bool:
        """Starts the next one, and tells it what the one before was told; says whether that is all."""
        helper = HelperProcess(self._diagnostics)
        try:
            listener = None if self._listener is None else self._listener.another()
            helper.start(msgspec.structs.replace(self._begin, again=True), listener, self._hung_up)
            return helper.pid is not None and self._install(helper)
        except OSError:  # there is no room for a pipe, or it has ended at once
            helper.abandon()
            return False

    def _install(self, helper: HelperProcess) -> bool:
        told = 0
        while not self._over.is_set():
            told += helper.brief(self._told[told:])
            with self._lock:
                if told == len(self._told) and not self._over.is_set():
                    self._helper, self.is_away, self._news = helper, False, True
                    self._diagnostics.count_fault("the helper process: started again")
                    return True
        helper.abandon()
        return True

    def _give_up(self) -> None:
        self._diagnostics.say_once(
            "helper_gone",
            "the helper process has ended again and is started no more: the journal is written on, but "
            "nothing is delivered or sampled while this program runs",
        )


def _cause(ended: int) -> str:
    """How a process ended, from its return code."""
    if ended >= 0:
        return f"exit code {ended}"
    try:
        return signal.Signals(-ended).name
    except ValueError:
        return f"signal {-ended}"
