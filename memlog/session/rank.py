"""Place of a session's run among those of the ranks that train together."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memlog._internal import distributed
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.distributed import Place
from memlog.delivery.helper.protocol import Message, Ranked
from memlog.journal import RunDirectory
from memlog.ranks.registration import Registration, register
from memlog.ranks.restarts import attempt_before
from memlog.settings import Settings


class SessionRank:
    """Rank of the process, from the launcher's variables or, at the first step, from torch's process group.

    Only rank 0 has runs in trackers: it joins the user's, or opens one.

    Args:
        diagnostics: Counts errors.

    Attributes:
        registration: Place of the run; ``None``: unknown yet, or the process trains alone.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._run: RunDirectory | None = None
        self._begun_us = 0
        self._place = distributed.place()
        self._tell: Callable[[Message], object] = lambda _: None
        self.registration: Registration | None = None

    @property
    def may_deliver(self) -> bool:
        """True if the process trains alone or has rank 0."""
        place = self._place or distributed.place()
        return place is None or place.rank == 0

    @property
    def has_shared_helper(self) -> bool:
        """True if another rank on the same machine starts the helper process."""
        return self.registration is not None and bool(self.registration.place.local_rank)

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of this rank: those of all but rank 0 name no tracker, and their rank."""
        place = self._place
        if place is None or place.rank == 0:
            return settings
        name = None if settings.name is None else f"{settings.name} rank {place.rank}"
        return msgspec.structs.replace(settings, backends=(), name=name)

    def begin(self, run: RunDirectory, begun_us: int, tell: Callable[[Message], object]) -> None:
        """Register the run if its rank is known.

        Args:
            run: The run.
            begun_us: When it began, Unix time in microseconds.
            tell: Sends a message to the helper process.
        """
        self._run, self._begun_us, self._tell = run, begun_us, tell
        if self._place is not None:
            self._register(self._place)

    def look_again(self) -> None:
        """Register the run if its rank is known only now, as after `mp.spawn`."""
        if self._place is None and (place := distributed.place()) is not None:
            self._place = place
            self._register(place)
            if self.registration is not None:
                self._tell(Ranked(self.registration))

    def _register(self, place: Place) -> None:
        with self._diagnostics.contained("registering the rank"):
            if self._run is not None:
                before = attempt_before(self._run, place, self._begun_us)
                self.registration = register(self._run, place, self._begun_us, before)
