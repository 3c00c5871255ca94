"""Messages printed about a session's runs in trackers: joined runs, opened runs, and how to view them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.launch_options import ONE_LINE
from memlog._internal.terminal import say
from memlog.journal import Binding, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.sink import LOCAL

if TYPE_CHECKING:
    from memlog.session.rank import SessionRank


class RunMessages:
    """Printer of one line per run of a tracker. No method raises."""

    def __init__(self, run: RunDirectory, rank: SessionRank, diagnostics: Diagnostics) -> None:
        self._run = run
        self._rank = rank
        self._diagnostics = diagnostics
        self._awaited = set(rank.wanted.backends) - {LOCAL}
        self._joined: set[tuple[str, str]] = set()

    def begun(self) -> None:
        """Print the run's folder if the run goes to no tracker."""
        if self._rank.wanted.backends == (LOCAL,):
            run = self._run
            self._say(f"run {run.id} is recorded in {run.path}: `{run.command('watch')}`")

    def joined(self, backend: str, binding: Binding) -> None:
        """Print that the session has joined the user's run ``binding``. Print this once for each run."""
        self._awaited.discard(backend)
        # A loop may return to the same run many times, for example to the parent of nested runs.
        if (backend, binding.run_id) not in self._joined:
            self._joined.add((backend, binding.run_id))
            self._say(f"run {self._run.id} joined {described(backend, binding)}")

    def look(self) -> None:
        """Print each run that memlog has opened, as soon as the helper process has saved the run's id."""
        for backend in () if self.is_silent else tuple(self._awaited):
            own = UploadState.load(self._run, backend).own_run
            if own is not None:
                self._awaited.discard(backend)
                self._say(f"run {self._run.id} opened {described(backend, own)}")

    @property
    def is_silent(self) -> bool:
        """True if no line is printed when the run begins.

        The session is ``quiet``, or this rank does not deliver its run to trackers.
        """
        return bool(self._rank.wanted.quiet) or not self._rank.may_deliver

    @property
    def has_one_line(self) -> bool:
        """True if the session prints only one line about the run, at its end."""
        return self._rank.wanted.quiet == ONE_LINE and self._rank.may_deliver

    def _say(self, line: str) -> None:
        with self._diagnostics.contained("printing which run is recorded"):
            if not self.is_silent:
                say(line)


def described(backend: str, run: Binding) -> str:
    """Return the tracker, name and link (a web address or a command) of a run as text."""
    name = run.run_id if run.name is None else repr(run.name)
    if run.link is None:
        return f"{backend} run {name}"
    link = run.link if "://" in run.link.partition(" ")[0] else f"`{run.link}`"
    return f"{backend} run {name}: {link}"
