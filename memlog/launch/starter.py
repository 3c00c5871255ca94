"""Start of a session in a process of ``memlog run``, at its first training step.

``memlog.init()`` takes the options from `memlog._internal.current_session`. The first step takes about 0.05 s
longer, because ``init`` runs in this step. The advantage is that a process without steps, such as pip, a data
loader's worker or torchrun's agent, starts no session.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from memlog._internal import current_session, processes
from memlog._internal.terminal import say
from memlog.autolog.optimizer_steps import Autolog, wait_for_a_session
from memlog.session.exit import is_a_child_of_multiprocessing
from memlog.session.session import init


class Starter:
    """Listener in one process for the first optimizer step or the first published event."""

    def __init__(self) -> None:
        self._began = False
        self._generation = processes.generation
        self._listen()

    def _listen(self) -> None:
        # A signal handler may publish while its own thread holds the lock.
        self._lock = threading.RLock()
        self._beginning = False
        self._autolog = Autolog(self._stepped)
        wait_for_a_session(self._autolog)
        current_session.begin_on_demand(self._published)

    def _stepped(self, optimizer: Any) -> None:
        """Begin a session at the first step; ignore steps after the script ended its session."""
        if current_session.on_demand():
            self._begin()
            if self._autolog.clock.on_step != self._stepped:  # the session has taken over
                self._autolog.clock.on_step(optimizer)

    def _published(self) -> None:
        """Begin a session before the first event is published, except in a pool's or data loader's worker."""
        if processes.generation == self._generation and not is_a_child_of_multiprocessing():
            self._begin()

    def _begin(self) -> None:
        with self._lock:  # another thread waits here until the session exists
            if self._beginning or not current_session.on_demand():
                return
            self._beginning = True
            try:
                init()
                self._began = True
            except Exception as error:  # noqa: BLE001 - memlog's errors must not end training
                say(" ".join(f"this process goes on without being recorded ({error})".split()))
            finally:
                self._beginning = False
                current_session.begin_on_demand(None)

    def forked(self) -> None:
        """After a fork, wait for the child's own first step. If the child trains, it gets its own run.

        Do nothing if the script itself began a session.
        """
        if self._began or current_session.on_demand():
            self._autolog.remove()
            self._began = False
            self._listen()


def wait() -> None:
    """Begin a session at this process's first training step. Call the function one time in each process."""
    os.register_at_fork(after_in_child=Starter().forked)
