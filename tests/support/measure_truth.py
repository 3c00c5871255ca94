"""Compare all surfaces for many made-up journals and real runs: ``python -m support.measure_truth``.

``make truth`` writes the result into docs/project/truth.md. Each number is a seed, so that a reader can
repeat a run: ``make truth ARGS="--journals 217:218 --runs 0 --ranks 0 --deaths 0 --repeats 0"``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from support.fork_server import end_servers
from support.planted_programs import (
    Outcome,
    Program,
    death,
    of_ranks,
    outcome_of,
    planted_program,
    repeated,
)
from support.planted_runs import ENDINGS, planted_run
from support.surfaces import SURFACES, contradictions, shown_verdict

REPEATED = ((128, 300), (1024, 100))
"""KiB a step and number of steps of the programs that are run again and again."""
_BEGIN, _END = "<!-- result of make truth -->", "<!-- end of the result -->"
_LISTED = 20
_OUTCOMES = ("cause", "growth", "unsure", "all-clear", "too few steps")

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class Judged(NamedTuple):
    """Result of one made-up journal."""

    seed: int
    kind: str
    ending: str
    outcome: str
    contradictions: list[str]


def outcome(verdict: str) -> str:
    """Return the group of a verdict: one of `_OUTCOMES`."""
    if "No growth" in verdict:
        return "all-clear"
    if re.search("Too few (recorded )?steps|Without steps", verdict):
        return "too few steps"
    if re.search(r"memory( on \w+)? (grew|rose|varied)|Unsure", verdict):
        return "unsure"
    return (
        "growth"
        if re.search(r"grows by [\d.]+ \w+ a step", verdict) and ("Memory grows" not in verdict)
        else "cause"
    )


def judged(seed: int) -> Judged:
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        run, truth = planted_run(Path(folder), seed)
        wrong = contradictions(run, truth)
        return Judged(seed, truth.kind, truth.ending, outcome(shown_verdict(run)), wrong)


def _journal(fields: Any) -> Judged:
    return Judged(*fields)


def _outcome(fields: Any) -> Outcome:
    program, *others = fields
    return Outcome(Program(*program), *others)


def _folder() -> str | None:
    """Return a folder in memory if there is one: the journals are small, and many."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a folder of its own there


def _in_folder(program: Program) -> Outcome:
    folder = Path(tempfile.mkdtemp())
    try:
        return outcome_of(program, folder)
    except Exception as error:  # noqa: BLE001 - a run that can't be read is a result, too
        return Outcome(program, "", [f"nothing can be read: {error!r}"], 0.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Kept:
    """Results in a file, one a line, so that a measurement that was interrupted can go on."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
        self._known: dict[str, Any] = dict(map(json.loads, lines))

    def each(
        self,
        pool: Executor,
        function: Callable[[_Given], _Made],
        given: Sequence[_Given],
        what: str,
        made_of: Callable[[Any], _Made],
    ) -> list[_Made]:
        """Return the results of a function, for each of its arguments."""
        keys = [f"{what} {number} {each}" for number, each in enumerate(given)]
        waiting = {
            pool.submit(function, each): key
            for key, each in zip(keys, given, strict=True)
            if key not in self._known
        }
        for number, done in enumerate(as_completed(waiting), 1):
            key = waiting[done]
            self._known[key] = done.result()
            if self._file:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self._known[key]]) + "\n")
            if number % 50 == 0 or number == len(waiting):
                print(f"{what}: {number} of {len(waiting)}", file=sys.stderr, flush=True)
        return [made_of(self._known[key]) for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    span = "FIRST:LAST"
    parser.add_argument("--journals", type=_seeds, default=range(950), metavar=span)
    parser.add_argument("--runs", type=_seeds, default=range(50), metavar=span)
    parser.add_argument("--deaths", type=_seeds, default=range(40), metavar=span)
    parser.add_argument("--ranks", type=_seeds, default=range(6), metavar=span)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep results in FILE, and measure what it lacks"
    )
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    kept = _Kept(options.keep)
    with ProcessPoolExecutor(options.jobs) as processes:
        journals = kept.each(processes, judged, options.journals, "journals", _journal)
    with ThreadPoolExecutor(options.jobs) as threads:

        def outcomes_of(programs: Sequence[Program], what: str) -> list[Outcome]:
            return kept.each(threads, _in_folder, programs, what, _outcome)

        runs = outcomes_of([planted_program(n) for n in options.runs], "runs")
        ranks = outcomes_of([of_ranks(n) for n in options.ranks], "runs of ranks")
        deaths = outcomes_of([death(n) for n in options.deaths], "deaths")
        again = [repeated(*one) for one in REPEATED for _ in range(options.repeats)]
        repeats = outcomes_of(again, "repeated runs")
    end_servers()
    text = "\n".join(report(journals, runs, ranks, deaths, repeats))
    print(text)
    if options.write:
        write(options.write, text)
    outcomes = [*runs, *ranks, *deaths, *repeats]
    found = sum(len(each.contradictions) for each in [*journals, *outcomes])
    sys.exit(found > 0)


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last)) if last else range(int(first))


def write(file: Path, text: str) -> None:
    """Write the result between the two markers of a page."""
    before, _, rest = file.read_text("utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    file.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", "utf-8")


def report(
    journals: Sequence[Judged],
    runs: Sequence[Outcome],
    ranks: Sequence[Outcome],
    deaths: Sequence[Outcome],
    repeats: Sequence[Outcome],
) -> Iterator[str]:
    yield f"Of {time.strftime('%Y-%m-%d')}, with {len(SURFACES)} surfaces.\n"
    yield "| what | runs | contradictions | all-clears although memory rose | false alarms |"
    yield "|---|---|---|---|---|"
    groups: list[tuple[str, Sequence[Judged | Outcome]]] = [
        ("made-up journals", journals),
        ("real runs", runs),
        ("real runs of two ranks", ranks),
        ("real runs that are killed", deaths),
        ("real runs, repeated", repeats),
    ]
    for name, group in groups:
        if group:
            yield f"| {name} | {len(group)} | {' | '.join(map(str, _counts(group)))} |"
    if journals:
        yield "\n**Journals**, by how memory goes and what the first line says:\n"
        yield from _table("memory", journals, lambda each: each.kind)
        yield "\nThe same by the end of the run:\n"
        yield from _table("end", journals, lambda each: each.ending, ENDINGS)
    if runs:
        yield "\n**Real runs**, by what holds memory:\n"
        yield "| holder | runs | named | unsure | all-clear |"
        yield "|---|---|---|---|---|"
        for holder in dict.fromkeys(each.program.holder for each in runs):
            yield _row(holder, [each for each in runs if each.program.holder == holder])
    if deaths:
        yield from _deaths(deaths)
    if repeats:
        yield from _repeats(repeats)
    yield from _list(groups)


def _deaths(deaths: Sequence[Outcome]) -> Iterator[str]:
    named = sum(each.names_the_cause for each in deaths)
    yield (
        f"\n**Deaths**: {len(deaths)} runs that keep 2 to 8 MiB a step in a list and are killed at a "
        f"random step from 30 to 400 name the cause in the first line in {named} cases "
        f"({named / len(deaths):.0%}); the others:"
    )
    for each in deaths:
        if not each.names_the_cause:
            yield f"\n- {each.program.ends} after {each.program.steps} steps: {each.verdict}"


def _repeats(repeats: Sequence[Outcome]) -> Iterator[str]:
    yield "\n**The same script again and again**:\n"
    yield "| KiB a step | steps | runs | named | unsure | all-clear |"
    yield "|---|---|---|---|---|---|"
    for rate, steps in REPEATED:
        same = [e for e in repeats if e.program == repeated(rate, steps)]
        yield f"| {rate} | {steps} {_row('', same).removeprefix('|').strip()}"


def _counts(group: Iterable[Judged | Outcome]) -> tuple[int, int, int]:
    texts = [text for each in group for text in each.contradictions]
    cleared = sum("an all-clear, but" in text for text in texts)
    return len(texts), cleared, sum("a false alarm" in text for text in texts)


def _table(
    heading: str,
    journals: Sequence[Judged],
    key: Callable[[Judged], str],
    order: Sequence[str] = ("rising", "healthy", "unclear"),
) -> Iterator[str]:
    yield f"| {heading} | runs | {' | '.join(_OUTCOMES)} |"
    yield "|---" * (len(_OUTCOMES) + 2) + "|"
    for name in order:
        group = [each for each in journals if key(each) == name]
        found = Counter(each.outcome for each in group)
        yield f"| {name} | {len(group)} | {' | '.join(str(found[one]) for one in _OUTCOMES)} |"


def _row(name: str, group: Sequence[Outcome]) -> str:
    found = Counter(outcome(each.verdict) for each in group)
    named = sum(each.names_the_cause for each in group if each.program.grows)
    counts = (len(group), named, found["unsure"] + found["growth"], found["all-clear"])
    return f"| {name} | {' | '.join(map(str, counts))} |"


def _list(groups: Iterable[tuple[str, Sequence[Judged | Outcome]]]) -> Iterator[str]:
    """Yield the first contradictions."""
    found = [
        f"{name}, seed {each.seed if isinstance(each, Judged) else each.program.seed}: {text}"
        for name, group in groups
        for each in group
        for text in each.contradictions
    ]
    if found:
        yield "\n**Contradictions**:\n"
        yield from (f"- {text}" for text in found[:_LISTED])
    if len(found) > _LISTED:
        yield f"- and {len(found) - _LISTED:,} more"


if __name__ == "__main__":
    main()
