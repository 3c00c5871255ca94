"""Position of a session's run among the runs of all ranks that train together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from memlog._internal import processes
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.processes import RankPosition
from memlog.delivery.helper.protocol import Message, Ranked
from memlog.journal import RunDirectory
from memlog.ranks.registration import Registration, Training, attempt_before, register
from memlog.settings import Settings
from memlog.sink import LOCAL

_DECIDED_WITHIN = 5.0
"""Maximum seconds that the end of a run waits for the search for lower ranks."""


class SessionRank:
    """Rank of the process, from the launcher's variables or from torch's process group.

    Only one rank has runs in trackers: the lowest rank that has a session. This rank joins the user's runs,
    or opens a run.

    Attributes:
        wanted: Settings that the user has passed.
        registration: Position of the run among the ranks' runs; ``None``: the rank is not yet known, the
            process trains alone, or the run could not be registered.
    """

    def __init__(self, wanted: Settings, diagnostics: Diagnostics) -> None:
        self.wanted = wanted
        self._diagnostics = diagnostics
        self._leads = self._is_lowest = False
        self._stepped: float | None = None
        self._search: threading.Thread | None = None
        self._run: RunDirectory | None = None
        self._begun_us = 0
        self._position = processes.rank_position()
        self._tell: Callable[[Message], object] = lambda _: None
        self.registration: Registration | None = None

    @property
    def may_deliver(self) -> bool:
        """True if the process trains alone, has rank 0, or has turned out to be the lowest rank."""
        position = self._position or processes.rank_position()
        return self._leads or position is None or position.rank == 0

    @property
    def settings(self) -> Settings:
        """This rank's settings. If the rank is not 0, ``backends`` is empty and the name ends in the rank."""
        position, wanted = self._position, self.wanted
        if position is None or position.rank == 0:
            return wanted
        name = None if wanted.name is None else f"{wanted.name} rank {position.rank}"
        return msgspec.structs.replace(wanted, backends=(), name=name, alert_webhook=False)

    def begin(self, run: RunDirectory, begun_us: int, tell: Callable[[Message], object]) -> None:
        """Register the run if its rank is known. ``tell`` sends a message to the helper process."""
        self._run, self._begun_us, self._tell = run, begun_us, tell
        if self._position is not None:
            self._register(self._position)

    def look_again(self) -> None:
        """Register the run if its rank has become known since the last check, as in a child of `mp.spawn`."""
        if self._position is None and (position := processes.rank_position()) is not None:
            self._position = position
            self._register(position)
            if self.registration is not None:
                self._tell(Ranked(self.registration))

    def takes_lead(self, *, has_stepped: bool, is_final: bool) -> bool:
        """Return True if this rank now gets runs in trackers, because no lower rank has a run.

        At most one call returns True. If a lower rank may be on another machine, every call returns False.

        The search for lower ranks begins `Settings.bind_grace` seconds after the first step. If the run ends
        (``is_final``), the search begins at once. Before the first step is complete, there is no search,
        because lower ranks may not be registered yet.
        """
        own = self.registration
        if self._leads or own is None or own.position.rank == 0 or not has_stepped:
            return False
        now = time.monotonic()
        self._stepped = now if self._stepped is None else self._stepped
        if self._search is not None:
            self._search.join(_DECIDED_WITHIN if is_final else 0)
        elif is_final:
            self._look_for_lower_ranks(own)  # no thread can be started at the interpreter's end
        elif now - self._stepped >= self.wanted.bind_grace:
            # On a thread, because the folder may be on a network disk.
            self._search = threading.Thread(
                target=self._look_for_lower_ranks, args=(own,), name="memlog-rank", daemon=True
            )
            self._search.start()
        self._leads = self._is_lowest
        return self._leads

    def _look_for_lower_ranks(self, own: Registration) -> None:
        with self._diagnostics.contained("looking for lower ranks"):
            is_certain = processes.lower_ranks_are_here(own.position)
            # To find that lower ranks are missing, the search by one rank of each machine is enough.
            if self._run is None or not (is_certain or not own.position.local_rank):
                return
            if not Training(self._run, own).has_lower_rank():
                self._is_lowest = is_certain
                if not is_certain and set(self.wanted.backends) - {LOCAL}:
                    self._say_that_rank_0_is_missing(own.position.rank)

    def _say_that_rank_0_is_missing(self, rank: int) -> None:
        self._diagnostics.say_once(
            "rank_0",
            f"rank {rank} finds no run of a lower rank in {self.wanted.directory}, so its memory is in no "
            "tracker: let all machines share the folder (MEMLOG_DIR), and call memlog.init() on rank 0 too",
        )

    def _register(self, position: RankPosition) -> None:
        with self._diagnostics.contained("registering the rank"):
            if self._run is not None:
                before = attempt_before(self._run, position, self._begun_us)
                self.registration = register(self._run, position, self._begun_us, before)
