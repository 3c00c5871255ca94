"""Beginning a session in a process that ``memlog run`` launched, when it turns out to train.

What it begins with is what ``memlog.init()`` takes from `memlog._internal.launch_options`. Starting at the
first step costs that step what ``init`` costs, a twentieth of a second; in return a process that never
steps, such as pip, a data loader's worker or torchrun's agent, starts nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from memlog._internal import current_session, fork
from memlog._internal.terminal import say
from memlog.autolog.optimizer_steps import Autolog, wait_for_a_session
from memlog.session.session import init


class Starter:
    """Waits, in one process, for the first optimizer step or the first thing that is published."""

    def __init__(self) -> None:
        self._began = False
        self._generation = fork.generation
        self._listen()

    def _listen(self) -> None:
        # A signal handler may publish while its own thread is in here.
        self._lock = threading.RLock()
        self._beginning = False
        self._autolog = Autolog(self._stepped)
        wait_for_a_session(self._autolog)
        current_session.begin_on_demand(self._published)

    def _stepped(self, optimizer: Any) -> None:
        """The first step, or one after a session that the script switched off."""
        if current_session.on_demand():
            self._begin()
            if self._autolog.clock.on_step != self._stepped:  # the session listens now
                self._autolog.clock.on_step(optimizer)

    def _published(self) -> None:
        """Something is about to be published. A pool's or a data loader's worker begins no session so."""
        if fork.generation == self._generation and not _is_a_child_of_multiprocessing():
            self._begin()

    def _begin(self) -> None:
        with self._lock:  # another thread waits until there is a session for it, too
            if self._beginning or not current_session.on_demand():
                return
            self._beginning = True
            try:
                init()
                self._began = True
            except Exception as error:  # noqa: BLE001 - memlog's errors end here, not in training
                say(" ".join(f"nothing is recorded, training goes on: {error}".split()))
            finally:
                self._beginning = False
                current_session.begin_on_demand(None)

    def forked(self) -> None:
        """This is the child of a fork: if it trains, that is a run of its own.

        Where the script itself began a session, its forks are its own affair.
        """
        if self._began or current_session.on_demand():
            self._autolog.remove()
            self._began = False
            self._listen()


def wait() -> None:
    """Begins a session when this process turns out to train. Called once a process."""
    starter = Starter()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=starter.forked)


def _is_a_child_of_multiprocessing() -> bool:
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None
