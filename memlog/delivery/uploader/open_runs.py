"""The tracker's runs that one uploader sends to, and the open sinks for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import msgspec

from memlog._internal.redact import without_credentials
from memlog.delivery.uploader.outbox import OWN
from memlog.errors import RunRefusedError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import End
from memlog.journal import Binding, RunDirectory, binding_of
from memlog.journal.delivery_state import Claim, ClaimOf, HelperLock, UploadState
from memlog.ranks.registration import registration_of, steps_ahead
from memlog.sink import Connection, DescribingSink, Sink, Target, TrackerRun

logger = logging.getLogger("memlog.delivery")

OpenSink = Callable[[Target], Sink]


class OpenRuns:
    """Open sinks by target. A target's sink is opened when it is first used.

    A target is the id of one of the user's runs, or ``None`` for the sink's own run.

    Args:
        open_sink: Function that builds a sink for a target. It may import the tracker's client.
        state: Saved state of the uploader, with the runs that exist and the runs that the tracker refuses.
        begins: Values that are the same for all sinks. Each sink gets a copy with the sink's own values.
        claim: Function that takes the id of a user's run and returns the run's `Claim`; ``None``: the
            training process writes to no runs.
        sync: Command that delivers the remaining data. Messages name it.
        may_replace: True if a sink may open a new run to replace a run that the tracker refuses.
    """

    def __init__(
        self,
        open_sink: OpenSink,
        state: UploadState,
        begins: Target,
        claim: ClaimOf | None,
        *,
        sync: str,
        may_replace: bool,
    ) -> None:
        self.refused_runs = RefusedRuns(state, sync, self._is_replaceable)
        self._open_sink = open_sink
        self._state = state
        self._begins = begins
        self._claim = claim
        self._may_replace = may_replace
        self._replaced: set[str | None] = set()
        self._uris: dict[str, str | None] = {}
        self._sinks: dict[str | None, Sink] = {}

    def connect(self, connection: Connection) -> None:
        """Set how the tracker's client connects."""
        self._begins = msgspec.structs.replace(self._begins, connection=connection)

    def note_run(self, run: TrackerRun) -> None:
        """Keep the full address of one of the user's runs, in memory only."""
        self._uris[run.run_id] = run.uri

    def note_binding(self, binding: Binding) -> None:
        """Keep the address of the run ``binding`` if no address of this run is known yet.

        An address from the journal has no credentials. An address from `note_run` can have credentials.
        """
        self._uris.setdefault(binding.run_id, binding.uri)

    def claimed(self, target: str | None) -> Claim | None:
        """Return the `Claim` of a run to which the training process writes; ``None`` for any other run."""
        return None if target is None or self._claim is None else self._claim(target)

    @property
    def are_durable(self) -> bool:
        """True if everything that the open sinks have taken is stored safely."""
        return all(sink.durable for sink in self._sinks.values())

    def __contains__(self, target: str | None) -> bool:
        return target in self._sinks

    def sink(self, target: str | None) -> Sink:
        """Return the sink of a target; open it if it is not open.

        Raises:
            RunRefusedError: the tracker refuses the run; `refused_runs` has the reason.
        """
        if target in self._sinks:
            return self._sinks[target]
        self.refused_runs.check(target)
        try:
            sink = self._new_sink(target)
            sink.probe()
            opened = sink.open()
        except TrackerRejectedError as error:
            if self._may_replace and self._is_replaceable(target):
                self._replaced.add(target)
                return self.sink(target)
            self.refused_runs.note(target, error)
            raise RunRefusedError(str(error)) from error
        self._sinks[target] = sink
        self.refused_runs.lift(target)
        self._remember(target, opened)
        return sink

    def refuse(self, target: str | None, error: RunRefusedError) -> None:
        """Record that the tracker refuses a run. Close the run's sink if that loses no data."""
        self.refused_runs.note(target, error)
        sink = self._sinks.get(target)
        if sink is not None and sink.durable:
            del self._sinks[target]
            with suppress(Exception):
                sink.close(None)

    def describe(self, target: str, description: Callable[[str | None], str]) -> None:
        """Store a description of a user's run, unless the run has one of the user's.

        ``description`` is the function that `close` has.
        """
        _describe(self.sink(target), description)

    def close(
        self,
        end: End | None,
        description: Callable[[str | None], str],
        newest: str | None = None,
    ) -> None:
        """Describe and end the runs that sinks opened, except those that the tracker refuses.

        Of the user's runs, describe only the one that memlog joined last. Earlier ones were described when
        they ended.

        If a restarted training continues memlog's own run, memlog does not end this run.

        Args:
            end: How the run ended; ``None``: the run has not ended.
            description: Function that takes the run's id in the tracker, and returns a text about the run.
                If the tracker stores no files of the run, the function gets ``None``.
            newest: Id of the user's run that memlog joined last; ``None``: memlog joined none.
        """
        if self._state.own_run is not None:
            with suppress(RunRefusedError):
                # An earlier uploader may have opened the run, and died before it ended the run.
                self.sink(None)
        for target, sink in self._sinks.items():
            its_end = end if target or self._state.continued_by is None else None
            try:
                if its_end is not None and target in (None, newest):
                    _describe(sink, description)
                sink.close(
                    its_end.status if its_end else None, its_end.time_us if its_end else None
                )
            except TrackerRejectedError as error:
                if not sink.durable:
                    raise
                self.refused_runs.note(target, error)

    def forget(self) -> None:
        """Drop the open sinks. The next use of a target opens a new sink."""
        self._sinks.clear()

    def _is_replaceable(self, target: str | None) -> bool:
        """Return whether the sink can open a run of its own to replace a refused run."""
        if target in self._replaced:
            return False
        if target is None:
            return self._state.own_run is not None
        return target not in self._state.beside and self.claimed(target) is None

    def _new_sink(self, target: str | None) -> Sink:
        replaced = target in self._replaced or target in self._state.beside
        users = None if target is None else TrackerRun(target, self._uris.get(target))
        beside = users if replaced or self.claimed(target) else None
        own = None if target is not None or replaced else self._state.own_run
        return self._open_sink(
            msgspec.structs.replace(
                self._begins,
                joined=None if beside else users,
                beside=beside,
                opened=TrackerRun(own.run_id, own.uri) if own is not None else None,
            )
        )

    def _remember(self, target: str | None, opened: TrackerRun) -> None:
        state = self._state
        # The id differs from the target if the sink has opened a run beside the user's run.
        if target is not None and opened.run_id not in state.joined:
            state.joined = [*state.joined, opened.run_id]
        if target is None:
            state.own_run = binding_of(opened)
        elif target in self._replaced and target not in state.beside:
            state.beside = [*state.beside, target]
        state.stage, state.problem = "delivering", self.refused_runs.problem


def _describe(sink: Sink, description: Callable[[str | None], str]) -> None:
    """Store a description of the run that a sink opened. Log a failure to make or store the text."""
    if not isinstance(sink, DescribingSink):
        return
    try:
        if sink.wants_description():
            has_files = getattr(sink, "has_files", True)
            sink.log_description(description(sink.open().run_id if has_files else None))
    except (RunRefusedError, TrackerUnavailableError):
        raise
    except Exception:
        logger.exception("a run gets no description")


class OwnRun:
    """memlog's own run in one tracker, for one session.

    Attributes:
        continues: memlog's id of the training's first session, which opened the run; ``None``: the training
            was not restarted.
    """

    def __init__(self, run: RunDirectory, state: UploadState) -> None:
        self._run = run
        self._state = state
        known = registration_of(run)
        self._before = None if known is None else known.before
        self.continues = None if self._before is None else self._before.first

    @cached_property
    def offset(self) -> int:
        """Number of a step in this session, minus the number of the same step in the tracker's run."""
        return -steps_ahead(self._run)

    def may_begin(self, *, is_allowed: bool, is_final: bool) -> bool:
        """Return whether the uploader can send events to memlog's own run now.

        Args:
            is_allowed: True if the uploader may open memlog's own run; False while the user might still
                open a run.
            is_final: True if the journal is complete.

        Raises:
            TrackerUnavailableError: The journal is complete, but another process still sends the data of the
                session before the restart.
        """
        if self._state.own_run is not None:
            return True
        if is_allowed and self._before is not None and not self._has_taken_over(self._before.run):
            if is_final:
                raise TrackerUnavailableError(
                    "the attempt before the restart is still being delivered to the same run"
                )
            return False
        return is_allowed

    def _has_taken_over(self, run_id: str) -> bool:
        """Take over the run and the alerts of the session before the restart.

        Take over nothing, and return False, if another process still sends that session's data.
        """
        before = RunDirectory(self._run.path.parent / run_id)
        if not before.path.exists():
            return True
        with HelperLock(before) as is_free:
            if is_free:
                known = UploadState.load(before, self._state.backend)
                known.continued_by = self._run.id
                known.save(before)
                self._state.own_run = known.own_run
                if OWN in known.outbox.alerts:
                    # A tracker may show all alerts of a run as one file.
                    self._state.outbox.alerts[OWN] = known.outbox.alerts[OWN]
            return is_free


RETRY_INTERVAL = 30.0
"""Minimum seconds between two attempts to deliver to refused runs, while the session goes on."""
_NAMED = 3
"""Maximum number of refused runs whose reasons a message lists. The message only counts the others."""


class RefusedRuns:
    """Runs that the tracker of one uploader refuses. The uploader's state has the runs and the reasons.

    ``sync`` is the command that delivers the remaining data. The message (`problem`) contains this command.
    ``is_replaceable`` returns whether the sink can open a run of its own to replace a refused run.
    """

    def __init__(
        self,
        state: UploadState,
        sync: str,
        is_replaceable: Callable[[str | None], bool],
    ) -> None:
        self._state = state
        self._sync = sync
        self._is_replaceable = is_replaceable
        self._blocked: set[str] = set()
        self._retry_at = 0.0
        self._needed = set(state.refused)
        self._is_final = False

    def begin(self, *, final: bool) -> None:
        """Begin a pass over the journal.

        ``final`` is True if the journal is complete. The first such pass tries all refused runs again.
        """
        now = time.monotonic()
        if now >= self._retry_at or (final and not self._is_final):
            self._blocked.clear()
            self._retry_at = now + RETRY_INTERVAL
        self._is_final = final
        self._needed = set()

    def end(self) -> None:
        """End a pass over the journal. Forget the refused runs for which the pass found no data."""
        for key in self._state.refused.keys() - self._needed:
            self.lift(key)

    def check(self, target: str | None) -> None:
        """Raise ``RunRefusedError`` if the tracker has refused a target's run and no retry is due."""
        key = target or OWN
        if key in self._blocked:
            self._needed.add(key)
            raise RunRefusedError(self._state.refused.get(key, "the run was refused"))

    def note(self, target: str | None, error: Exception) -> None:
        """Block a refused target until the next retry. Store the error's text."""
        key = target or OWN
        self._needed.add(key)
        if key not in self._blocked:
            self._blocked.add(key)
            self._state.refused[key] = without_credentials(str(error))

    def lift(self, target: str | None) -> None:
        """Unblock a target, because the tracker accepts it, or because no data waits for it."""
        key = target or OWN
        self._state.refused.pop(key, None)
        self._blocked.discard(key)

    @property
    def problem(self) -> str | None:
        """Message with the reasons, and the command that delivers the data; ``None`` if no run is refused."""
        reasons = list(self._state.refused.values())
        if not reasons:
            return None
        message = "; ".join(reasons[:_NAMED])
        if len(reasons) > _NAMED:
            message += f"; and {len(reasons) - _NAMED:,} more runs like these"
        exist, own = ("it exists", "a run") if len(reasons) == 1 else ("they exist", "runs")
        message += f": nothing is lost, `{self._sync}` delivers the rest once {exist} again"
        if any(self._is_replaceable(key or None) for key in self._state.refused):
            message += f", or `{self._sync} --own-run` delivers it to {own} of memlog's own"
        return message
