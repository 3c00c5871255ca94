"""Lines printed about a session's runs in trackers: joined runs, opened runs, and how to view them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlog._internal import distributed
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import say
from memlog.journal import Binding, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.journal.run_names import tracker_runs
from memlog.sink import LOCAL

if TYPE_CHECKING:
    from memlog.session.peak_watch import PeakWatch
    from memlog.session.rank import SessionRank


class RunLines:
    """Printer of one line per run of a tracker, and of the last lines of ``finish``. No method raises.

    If the session is ``quiet``, or if only another rank has runs in trackers, only the verdict is printed.
    """

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
        for backend in () if self._is_silent else tuple(self._awaited):
            own = UploadState.load(self._run, backend).own_run
            if own is not None:
                self._awaited.discard(backend)
                self._say(f"run {self._run.id} opened {described(backend, own)}")

    def print_end(
        self, verdict: str | None, peaks: PeakWatch, host_limit: int | None, *, failed: bool
    ) -> None:
        """Print the last lines: the verdict or the peak, and how to view the run.

        This method is also called while the interpreter exits. So it imports nothing, unless memory ran out.
        Some modules evaluate text when they are imported, for example to define a named tuple. At exit, such
        an import makes Python forget that Ctrl-C ended the program, and changes the exit code.

        ``verdict`` is the most important finding, which is always printed. ``host_limit`` is the number of
        bytes that the process may use; ``None``: unknown.
        """
        with self._diagnostics.contained("printing the last lines"):
            failure = peaks.failure if failed else None
            if self._is_silent:
                place = distributed.place()
                of = "" if place is None else f"rank {place.rank}: "
                lines = [verdict and f"{of}{verdict}"]
            else:
                first = verdict or peaks.sentence(host_limit)
                if failure is not None:
                    from memlog.reports.verdict import failure_title  # noqa: PLC0415 - see above

                    rest = f". {first[0].upper()}{first[1:]}" if first else "."
                    first = f"{failure_title(failure, peaks.last_step)}{rest}"
                lines = [first, *self._links(first is not None)]
            for line in filter(None, lines):
                say(line)

    @property
    def _is_silent(self) -> bool:
        return self._rank.wanted.quiet or not self._rank.may_deliver

    def _say(self, line: str) -> None:
        with self._diagnostics.contained("printing which run is recorded"):
            if not self._is_silent:
                say(line)

    def _links(self, has_data: bool) -> list[str]:
        """Return a line for each tracker's run.

        If there is no such run but memlog's run has data, return the command that shows memlog's run.
        """
        runs = tracker_runs(self._run) if self._run.path.exists() else {}
        if runs:
            return [described(*each) for each in runs.items()]
        show = self._run.command("show")
        return [f"run {self._run.id}: `{show}`"] if has_data and self._run.path.exists() else []


def described(backend: str, run: Binding) -> str:
    """Return a tracker's run as text: its name, and its address or the command that shows it."""
    name = run.run_id if run.name is None else repr(run.name)
    if run.link is None:
        return f"{backend} run {name}"
    link = run.link if "://" in run.link.partition(" ")[0] else f"`{run.link}`"
    return f"{backend} run {name}: {link}"
