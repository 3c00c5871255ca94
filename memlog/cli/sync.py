"""``memlog sync``: delivery, in the foreground, of the points that a run's trackers don't have yet."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from memlog._internal.connections import waiting_at_most
from memlog._internal.terminal import one_line
from memlog.cli import SETTINGS
from memlog.cli.addresses import Guard, connection_of, known_address, place_of, trust_option
from memlog.cli.completion import complete_backends
from memlog.cli.output import DeliveryProgress, dir_option, run_argument
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import (
    ConfigurationError,
    MemlogError,
    TrackerRejectedError,
    TrackerUnavailableError,
)
from memlog.journal import RunDirectory
from memlog.journal.delivery_state import (
    InProcessState,
    Progress,
    TakenOver,
    UploadState,
    claims_of,
    read_states,
)
from memlog.ranks.registration import find_named_run
from memlog.reports import Summary, summarize
from memlog.reports.schema import Delivery
from memlog.settings import runs_directory
from memlog.sink import LOCAL, Backend, TrackerRun, find_backends, load_backend, writes_in_process

_RETRY = 1.0
"""Seconds between two attempts to reach a tracker."""
_LEAST = 5.0
"""Minimum seconds for which memlog waits for the tracker's answer, even if ``--timeout`` is shorter."""


@click.command(context_settings=SETTINGS)
@run_argument
@click.option(
    "--to",
    "backend",
    metavar="BACKEND",
    shell_complete=complete_backends,
    help="Deliver to this tracker instead.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to retry if the tracker can't be reached.",
)
@click.option(
    "--own-run",
    "replace",
    is_flag=True,
    help="If the tracker refuses a run (deleted for good, for example), deliver to a run of memlog's own.",
)
@trust_option
@dir_option
def sync(
    run: str,
    backend: str | None,
    timeout: float,
    replace: bool,
    trusted: tuple[str, ...],
    directory: Path | None,
) -> None:
    """Deliver the points that a run's trackers don't have yet.

    RUN is a run's id or the id's beginning, its name in a tracker, or "latest". Its points go to the trackers
    for which it was recorded. If the command fails, no point is lost. If you repeat the command, no point
    is delivered twice. If the run has ended and its helper process still waits for a tracker, this command
    stops the helper process.

    The points go to the address to which the training script sent them, even if your environment names
    another one. A user and password for exactly that address are taken from the environment. If the
    addresses differ and your environment holds credentials, nothing is sent until you name the address
    with --trust-address. Nor is anything written to a file or folder (sqlite:///…) that your environment
    does not name. With --to, a run that this tracker does not have yet is opened at the address
    in your environment (for MLflow: MLFLOW_TRACKING_URI).

    If a tracker's run was deleted, its points wait until you restore the run; all other points are
    delivered. If you can't restore the run, --own-run delivers its points to a run that memlog opens.
    """
    named_run = find_named_run(runs_directory(directory), run)
    publish_afterwards(named_run)
    explain_afterwards(named_run)
    summary = summarize(named_run, remember=True)
    failures: list[MemlogError] = []
    elsewhere = backend is not None
    for name in _backends(summary, backend):
        delivery = _Delivery(
            named_run, summary, name, trusted, elsewhere=elsewhere, replace=replace
        )
        try:
            outcome, refused = _sync(delivery, timeout)
            click.echo(one_line(outcome))
            if refused:
                failures.append(TrackerRejectedError(f"{name}: {refused}"))
        except MemlogError as error:  # delivery to the other trackers goes on
            failures.append(error)
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))
    if summary.status == "running":
        click.echo(
            f"run {named_run.id} is still running: call `{named_run.command('sync')}` again for its newest "
            "points"
        )


def _backends(summary: Summary, wanted: str | None) -> list[str]:
    if wanted == LOCAL:
        raise ConfigurationError(
            f"{LOCAL} is the journal itself, which already has everything: {_choices()}"
        )
    backends = [wanted] if wanted else list(summary.health.delivered)
    if not backends:
        raise ConfigurationError(f"run {summary.run.id} was recorded for no tracker: {_choices()}")
    return backends


def _choices() -> str:
    installed = ", ".join(sorted(find_backends()))
    remedy = f"installed: {installed}" if installed else "pip install mlflow, or pip install wandb"
    return f"name one with --to ({remedy})"


class _Delivery(NamedTuple):
    """A run, the backend that it is delivered to, and the command's options."""

    run: RunDirectory
    summary: Summary
    name: str
    trusted: Sequence[str]
    elsewhere: bool
    """True with --to: memlog opens new runs at the address in the user's environment."""
    replace: bool
    """True with --own-run: if the tracker refuses a run, memlog opens a run to replace it."""

    @property
    def is_complete(self) -> bool:
        """True if the run has ended, so that its journal is complete."""
        return self.summary.status != "running"

    @property
    def known(self) -> Delivery | None:
        """State of the delivery in the summary; ``None`` if the backend is new."""
        return self.summary.health.delivered.get(self.name)


def _sync(delivery: _Delivery, timeout: float) -> tuple[str, str | None]:
    """Deliver to one backend and return a line on the outcome.

    The second value is the reason why the backend refused runs; ``None`` if it refused none.
    """
    run, name, complete = delivery.run, delivery.name, delivery.is_complete
    state = next((state for state in read_states(run) if state.backend == name), None)
    if state is not None and complete and _is_done(run, state):
        outcome = f"nothing is left to deliver, {state.delivered:,} points were delivered"
        return f"{name}: {outcome}{_where(state, delivery.known)}", None
    backend = load_backend(name)
    with TakenOver(run, name, timeout, is_over=complete):
        uploader = _uploader(delivery, backend)
        # A copy, because the uploader changes its state in place.
        before = copy.deepcopy(uploader.state)
        with DeliveryProgress(uploader):
            _deliver(uploader, timeout, complete=complete)
        user_run = InProcessState.load(run, name)
        if user_run is not None and complete and uploader.refused is None:
            user_run.mark_delivered(run)
    outcome = _outcome(before, uploader.state)
    return f"{name}: {outcome}{_where(uploader.state, delivery.known)}", uploader.refused


def _uploader(delivery: _Delivery, backend: Backend) -> Uploader:
    run, summary = delivery.run, delivery.summary
    header, name = run.trainer(), backend.name
    claim = None
    if writes_in_process(backend):  # the training process has written a part of the data
        claim = claims_of(run, name, complete=delivery.is_complete)
    uploader = Uploader(
        run,
        name,
        Guard(backend, delivery.trusted).open_sink,
        project=summary.run.project,
        name=summary.run.name,
        begun_us=header.begun_us if header else None,
        may_open_own=True,
        may_replace=delivery.replace,
        claim=claim,
    )
    connection = connection_of(backend)
    if uploader.state.address is not None and not delivery.elsewhere:
        # If the tracker was never reached, the run is opened where the trainer would have opened it.
        uri = known_address(uploader.state.address, connection)
        connection = msgspec.structs.replace(connection, uri=uri)
    for known in delivery.known.runs if delivery.known else ():
        uri = known_address(known.uri, connection)
        uploader.note_run(TrackerRun(known.id, uri))
        if known.own:
            connection = msgspec.structs.replace(connection, uri=uri)
    uploader.connect(connection)
    return uploader


def _is_done(run: RunDirectory, state: UploadState) -> bool:
    """Return True if the whole journal was delivered, according to the saved state alone."""
    if state.stage != "done":
        return False
    sent = {file: state.files.get(file.process, Progress()).sent for file in run.files()}
    return all(next(file.read(position), None) is None for file, position in sent.items())


def _deliver(uploader: Uploader, timeout: float, *, complete: bool) -> None:
    """Deliver everything. Only time without progress counts towards the timeout.

    Raises:
        TrackerUnavailableError: There was no progress for ``timeout`` seconds.
    """
    since, delivered = time.monotonic(), uploader.state.delivered
    while True:
        left = since + timeout - time.monotonic()
        try:
            with waiting_at_most(max(left, _LEAST)):
                return _attempt(uploader, complete=complete)
        except TrackerUnavailableError as error:
            if uploader.state.delivered > delivered:
                since, delivered = time.monotonic(), uploader.state.delivered
            left = since + timeout - time.monotonic()
            if left <= 0:
                raise TrackerUnavailableError(_gave_up(uploader, timeout, error)) from error
            time.sleep(min(_RETRY, left))


def _attempt(uploader: Uploader, *, complete: bool) -> None:
    uploader.deliver(complete=complete)
    if not complete:
        return
    try:
        uploader.close()
    except MemlogError:
        raise
    except Exception as error:
        # A tracker's client may raise anything, and the next attempt may succeed.
        raise TrackerUnavailableError(f"{type(error).__name__}: {error}") from error


def _gave_up(uploader: Uploader, timeout: float, error: Exception) -> str:
    problem = str(error).removeprefix(f"{uploader.backend}: ")
    return (
        f"{uploader.backend}: {problem}; gave up after {timeout:g} s: nothing is lost, call "
        f"`{uploader.run.command('sync')}` again when it can be reached"
    )


def _outcome(before: UploadState, after: UploadState) -> str:
    """Return a text with the numbers of delivered and refused points."""
    points = after.delivered - before.delivered
    left = "nothing more was delivered" if after.refused else "nothing was left to deliver"
    outcome = f"{points:,} points delivered" if points else left
    refused = sum(after.dropped.values()) - sum(before.dropped.values())
    if refused:
        outcome += f", {refused:,} refused (`memlog show` lists them)"
    return outcome


def _where(state: UploadState, delivery: Delivery | None) -> str:
    uris = {run.id: run.uri for run in delivery.runs} if delivery else {}
    if state.own_run:
        uris[state.own_run.run_id] = state.own_run.uri
    runs = [*state.joined, *([state.own_run.run_id] if state.own_run else [])]
    if len(runs) != 1:
        return f" ({len(runs):,} runs)" if runs else ""
    uri = uris.get(runs[0])
    return f" (run {runs[0]}{place_of(state.backend, uri)})"
