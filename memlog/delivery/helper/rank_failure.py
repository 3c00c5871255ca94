"""Tell in the run of the lowest rank which rank of the training failed first, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.safe_files import read_plain
from memlog.delivery.helper.rank_reader import RankReader
from memlog.delivery.helper.training_news import RANK_ENDED
from memlog.events import (
    POSTMORTEM_FILE,
    POSTMORTEM_KIND,
    Alert,
    Artifact,
    RankDoubt,
    RankFailure,
    now_us,
)
from memlog.facts.failure import title_with_cause
from memlog.facts.levels import unsteady
from memlog.facts.reading import facts_of
from memlog.facts.run_fold import RunFold
from memlog.facts.run_verdict import RunVerdict
from memlog.facts.verdict import of_memory
from memlog.findings import of_rank
from memlog.journal import RunDirectory
from memlog.journal.artifacts import artifact_path, keep, keep_text
from memlog.ranks.ends import Failure, RankEnd

_EXPLAINED_WITHIN = 8.0
"""Maximum seconds to wait for the report on another rank's bad end."""
_LOOK_EVERY = 0.1
_OF_MEMORY = frozenset({"flamegraph", "snapshot"})
"""Kinds of the other rank's files that are copied: they show what held the memory."""
_MOST_TEXT = 1024**2


def about_failure(
    run: RunDirectory, failure: Failure, title: str | None, diagnostics: Diagnostics
) -> Iterator[RankFailure | Alert]:
    """Yield the events about a bad end of which this rank, or no rank, is the cause.

    ``title`` is the title of the report on this run's end; ``None``: there is no report.
    """
    first = failure.first
    named = failure.title if first is None else title
    if named is None and first is not None:
        with diagnostics.contained("reading how this rank failed"):
            named = _title(facts_of(run), first)
    yield from _events(failure, named or failure.title, None, None, has_report=title is not None)


def about_another_rank(
    run: RunDirectory,
    failure: Failure,
    reader: RankReader,
    look: Callable[[], object],
    diagnostics: Diagnostics,
) -> Iterator[RankFailure | Alert | Artifact]:
    """Yield the events about a training in which another rank failed first, and copy that rank's report.

    ``reader`` reads that rank's journal. ``look`` reads what is new in all ranks' journals.
    """
    first = failure.first
    if first is None:
        return
    title, judged, copies = first.sentence, None, []
    with diagnostics.contained("reading how another rank failed"):
        _wait_for_report(reader, look, diagnostics)
        facts = facts_of(reader.run)
        status = facts.status(alive=False)
        title = _title(facts, first) or title
        judged = of_memory(facts, status)
    with diagnostics.contained("copying the report on another rank"):
        copies = list(_copies(run, reader.run, first.rank))
    yield from copies
    has_report = any(copy.kind == POSTMORTEM_KIND for copy in copies)
    yield from _events(failure, title, reader.run, judged, has_report=has_report)


def doubt_about(
    own_rank: int, readers: Mapping[int, RankReader], diagnostics: Diagnostics
) -> RankDoubt | None:
    """Return the doubt about another rank whose memory rose most, and for which no cause was found."""
    rises: list[tuple[float, int]] = []
    for rank, reader in readers.items():
        known = unsteady(reader.levels)
        if rank != own_rank and not reader.has_finding and known is not None and known[1].rise > 0:
            rises.append((-known[1].rise, rank))
    with diagnostics.contained("judging another rank's memory"):
        for _, rank in sorted(rises)[:1]:
            facts = facts_of(readers[rank].run)
            judged = of_memory(facts, facts.status(alive=False))
            if judged.rises:
                return RankDoubt(now_us(), facts.last_step, rank, judged.text)
    return None


def _events(
    failure: Failure,
    title: str,
    other: RunDirectory | None,
    judged: RunVerdict | None,
    *,
    has_report: bool,
) -> Iterator[RankFailure | Alert]:
    first = failure.first or failure.afterwards[0]
    yield RankFailure(
        first.time_us,
        first.step,
        None if failure.first is None else first.rank,
        None if other is None else other.id,
        failure.status,
        title,
        failure.text,
        "" if judged is None else judged.text,
        None if judged is None else judged.outcome,
    )
    grew = (
        judged.text if judged is not None and (judged.rises or judged.outcome == "finding") else ""
    )
    told = [f"{failure.text}.", grew, f"{POSTMORTEM_FILE} explains it" if has_report else ""]
    text = " ".join(filter(None, told))
    yield Alert(first.time_us, first.step, "error", RANK_ENDED, title, text)


def _title(facts: RunFold, first: RankEnd) -> str | None:
    """Return the title of the report on a rank's end; ``None`` if only the end itself is known."""
    if facts.failure_title is not None:
        return facts.failure_title
    if facts.failure is None or not first.out_of_memory:
        return None
    return of_rank(first.rank, title_with_cause(facts.failure, facts.last_step))


def _wait_for_report(
    reader: RankReader, look: Callable[[], object], diagnostics: Diagnostics
) -> None:
    """Wait until the rank's helper process has explained the end. If the rank has no helper, explain it."""
    # Imported here: few trainings fail, and the import would delay the helper's start.
    from memlog.delivery.helper.postmortem import explain_afterwards  # noqa: PLC0415

    header = reader.run.trainer()
    is_here = header is not None and header.process.host == os.uname().nodename
    deadline = time.monotonic() + _EXPLAINED_WITHIN
    while not reader.has_report and time.monotonic() < deadline:
        if is_here and explain_afterwards(reader.run, "helper", diagnostics):
            break
        time.sleep(_LOOK_EVERY)
        look()
    look()


def _copies(run: RunDirectory, other: RunDirectory, rank: int) -> Iterator[Artifact]:
    """Copy another rank's report, and the files that show what held its memory, into this run."""
    newest = {each.name: each for each in other.events() if isinstance(each, Artifact)}
    names: dict[str, str] = {}
    for artifact in newest.values():
        path = artifact_path(other, artifact)
        if artifact.kind in _OF_MEMORY and path is not None:
            names[artifact.name] = f"rank{rank}-{artifact.name}"
            yield keep(run, path, names[artifact.name], artifact.kind)
    report = newest.get(POSTMORTEM_FILE)
    if report is not None:
        text = read_plain(other.path, report.path, _MOST_TEXT).decode("utf-8", "replace")
        for name, copied in names.items():
            text = text.replace(name, copied)
        yield keep_text(run, text, POSTMORTEM_FILE, POSTMORTEM_KIND)
