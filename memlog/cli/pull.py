"""``memlog pull``: download of a run's files, from a tracker or from the run's own folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from memlog._internal.terminal import format_bytes, one_line
from memlog.artifacts.pulling import Choice, JournalStore, Pulled, Puller, choose
from memlog.artifacts.server import is_openable
from memlog.cli import SETTINGS
from memlog.cli.addresses import Guard, connection_of, known_address, trust_option
from memlog.cli.completion import complete_backends
from memlog.cli.output import TransferMeter, dir_option, page, plain, run_argument, table
from memlog.errors import (
    AmbiguousRunError,
    ArtifactError,
    ConfigurationError,
    RunNotFoundError,
    TrackerRejectedError,
    TrackerUnavailableError,
)
from memlog.journal import RunDirectory
from memlog.journal.runs import LATEST
from memlog.ranks.registration import find_named_run
from memlog.reports import summarize
from memlog.settings import runs_directory
from memlog.sink import LOCAL, ArtifactStore, Backend, load_backend

_OUTCOMES = {"written": "", "same": "was here already, the same", "replaced": "replaced another"}

_SHOWN_FAILURES = 3


class Source(msgspec.Struct, frozen=True):
    """Store that holds a run's files, and the run's id in this store."""

    backend: str
    run_id: str
    store: ArtifactStore


@click.command(context_settings=SETTINGS)
@run_argument
@click.option(
    "--backend",
    shell_complete=complete_backends,
    help="Fetch from this tracker (mlflow, wandb, trackio) rather than from the run's folder.",
)
@click.option("--kind", help="Only files of this kind: flamegraph, snapshot, …")
@click.option(
    "-o",
    "--output",
    "output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to put them in.",
)
@click.option("--force", is_flag=True, help="Replace files that are there and differ.")
@trust_option
@dir_option
def pull(
    run: str,
    backend: str | None,
    kind: str | None,
    output: Path,
    force: bool,
    trusted: tuple[str, ...],
    directory: Path | None,
) -> None:
    """Download a run's files.

    RUN is a run's id or the id's beginning, its name in a tracker, or "latest". With --backend it may also be
    the tracker's id of a run that this machine does not know. For MLflow, your environment names the
    server (MLFLOW_TRACKING_URI).

    Without --force no existing file is replaced: a file that differs gets a number in its name.
    """
    pulled: list[Pulled] = []
    failures: list[str] = []
    sources = _sources(run, backend, directory, trusted)
    try:
        for source in sources:
            choice = choose(source.store.list_artifacts(source.run_id), kind)
            if choice.files:
                puller = Puller(source.store, source.run_id, output, force=force)
                _pull(puller, choice, pulled, failures)
            if choice.refused:
                failures.append(_refused(choice))
    except TrackerUnavailableError as error:
        raise TrackerUnavailableError(
            f"{sources[0].backend}: {error}; call `memlog pull` again when it can be reached"
        ) from error
    finally:
        # If the tracker failed in the middle, the files that were downloaded before are complete.
        if pulled:
            _print(pulled, sources)
    if failures:
        raise ArtifactError(_joined(failures))
    if not pulled:
        raise ArtifactError(_nothing(sources, kind))


def _sources(
    name: str, backend_name: str | None, directory: Path | None, trusted: Sequence[str]
) -> list[Source]:
    """Return the stores that hold the run's files, with the run's id in each."""
    tracker = backend_name or LOCAL
    backend = None if tracker == LOCAL else load_backend(tracker)
    if backend is not None and not hasattr(backend, "open_store"):
        raise ConfigurationError(
            f"backend {tracker!r} can't download files: name another with --backend"
        )
    try:
        run = find_named_run(runs_directory(directory), name)
    except RunNotFoundError as error:
        if backend is None:
            raise RunNotFoundError(
                f"{error}; if it is a tracker's run, name the tracker: --backend B"
            ) from error
        if name == LATEST or isinstance(error, AmbiguousRunError):
            raise
        return [Source(tracker, name, backend.open_store(connection_of(backend)))]
    if backend is None:
        return [Source(LOCAL, run.id, JournalStore(run))]
    sources = _delivered(run, backend, tracker, trusted)
    return [source for source in sources if source.run_id == name] or sources


def _delivered(
    run: RunDirectory, backend: Backend, name: str, trusted: Sequence[str]
) -> list[Source]:
    """Return the tracker's runs to which a run of this machine was delivered."""
    delivery = summarize(run, remember=True).health.delivered.get(name)
    guard, connection = Guard(backend, trusted), connection_of(backend)
    sources = []
    for tracked in delivery.runs if delivery else ():
        uri = known_address(tracked.uri, connection)
        guard.require(uri)
        store = backend.open_store(msgspec.structs.replace(connection, uri=uri))
        sources.append(Source(name, tracked.id, store))
    if not sources:
        raise ConfigurationError(
            f"run {run.id} was not delivered to {name}: leave out --backend to copy its files from its "
            f"folder, or deliver it with `{run.command('sync')} --to {name}`"
        )
    return sources


def _pull(puller: Puller, choice: Choice, pulled: list[Pulled], failures: list[str]) -> None:
    """Download the files. If a file fails, go on with the others."""
    puller.room_for(choice.size)
    with TransferMeter(choice.size) as meter:
        for artifact in choice.files:
            meter.begin(artifact.name)
            try:
                pulled.append(puller.pull(artifact, meter.arrived))
            except (ArtifactError, TrackerRejectedError) as error:
                failures.append(str(error))


def _joined(failures: list[str]) -> str:
    shown = failures[:_SHOWN_FAILURES]
    more = len(failures) - len(shown)
    return "; ".join([*shown, f"and {more:,} more like these"] if more else shown)


def _refused(choice: Choice) -> str:
    return (
        f"{len(choice.refused):,} files were left out, because their names are not safe to write "
        f"(such as {choice.refused[0][:60]!r}): fetch them with the tracker's own client"
    )


def _nothing(sources: list[Source], kind: str | None) -> str:
    run = ", ".join(source.run_id for source in sources)
    of_kind = f" of kind {kind!r}" if kind else ""
    where = "" if sources[0].backend == LOCAL else f" in {sources[0].backend}"
    remedy = "leave out --kind for all files" if kind else "session.save_artifact(path) adds one"
    return f"run {run}{where} has no files{of_kind}: {remedy}"


def _print(pulled: list[Pulled], sources: list[Source]) -> None:
    total = format_bytes(sum(file.size for file in pulled))
    origin = f"run {sources[0].run_id}" if len(sources) == 1 else f"{len(sources):,} runs"
    files = "1 file" if len(pulled) == 1 else f"{len(pulled):,} files"
    with page() as console:
        backend = sources[0].backend
        store = "its own folder" if backend == LOCAL else backend
        console.print(plain(f"{files} of {origin} from {store}, {total}"))
        headings = ("path", "kind", "size", "")
        made = table(console, *headings, right=["size"], folded=headings)
        for file in pulled:
            made.add_row(
                plain(file.path),
                plain(file.artifact.kind),
                format_bytes(file.size),
                _OUTCOMES[file.outcome],
            )
        console.print(made)
    first = next((file.path for file in pulled if is_openable(file.path)), None)
    if first is not None:
        click.echo(one_line(f"look at it: memlog open {shlex.quote(str(first))}"))
