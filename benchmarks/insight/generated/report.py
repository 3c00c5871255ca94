"""The tables of the generated programs as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.__main__ import machine
from benchmarks.insight.generated.holders import HOLDERS
from benchmarks.insight.generated.programs import PERIODS, Program
from benchmarks.insight.generated.scoring import PART_OF_FREE, SOON_PERIODS, SOON_STEPS, Score
from benchmarks.insight.generated.things import THINGS

if TYPE_CHECKING:
    from benchmarks.insight.generated.run import Result

BEGIN, END = "<!-- result of make leaks -->", "<!-- end of the result of make leaks -->"
_AIMS = {"found": "95 %", "named": "90 %", "cause": "", "remedy": "90 %", "early": "", "soon": ""}


def put_into(file: Path, text: str) -> None:
    """Write the tables between the two markers of a page."""
    before, _, rest = file.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def text(results: Sequence[Result]) -> str:
    """Return the figures over all programs, the tables, and a list of the failures."""
    judged = [(each.program, each.score) for each in results if each.score is not None]
    seeds = sorted({each.program.seed for each in results})
    parts = [
        machine(),
        f"{2 * len(judged)} runs: {len(judged)} programs of {_counted(seeds)} with a leak, and their twins.",
        "\n".join(_summary([score for _, score in judged])),
        "Found, named and with the right remedy, by holder and by the steps between two times:",
        "\n".join(_matrix(judged)),
    ]
    for heading, key, names in (
        ("what is kept", _kept, [each.name for each in THINGS]),
        ("end", lambda each: each.end, ["finish", "kill"]),
        ("trainer", lambda each: each.trainer, ["plain", "Lightning", "HF"]),
    ):
        parts.append("\n".join(_table(heading, judged, key, names)))
    if failures := list(_failures(results)):
        parts += [
            "Failures, by what is wrong (seed:program, to run one again alone):",
            "\n".join(failures),
        ]
    return "\n\n".join(parts)


def _kept(program: Program) -> str:
    return program.kept.name


_Judged: TypeAlias = Sequence[tuple[Program, Score]]


def _counted(seeds: Sequence[int]) -> str:
    return f"the {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _summary(scores: Sequence[Score]) -> Iterator[str]:
    names = {
        "found": "leak found",
        "named": "holder named",
        "cause": "kind of cause right",
        "remedy": "remedy right",
        "early": f"named before {PART_OF_FREE:.0%} of free memory is taken, or soon",
        "soon": f"named soon: within {SOON_STEPS} steps or {SOON_PERIODS} periods",
    }
    yield "| | | aim |"
    yield "|---|---|---|"
    for field, name in names.items():
        yield f"| {name} | {_percent(scores, field)} | {_AIMS[field]} |"
    alarms = sum(each.false_alarm for each in scores)
    yield f"| false alarms on twins | {alarms} of {len(scores)} | 0 |"
    yield f"| twins of which memlog is unsure | {sum(each.unsure for each in scores)} | |"


def _matrix(judged: _Judged) -> Iterator[str]:
    yield f"| holder | {' | '.join(map(str, PERIODS))} |"
    yield "|---" * (len(PERIODS) + 1) + "|"
    for holder in HOLDERS:
        cells = []
        for period in PERIODS:
            found = [s for p, s in judged if p.holder == holder and p.period == period]
            counts = [
                sum(getattr(s, field) for s in found) for field in ("found", "named", "remedy")
            ]
            cells.append(f"{'·'.join(map(str, counts))} of {len(found)}" if found else "")
        yield f"| {holder} | {' | '.join(cells)} |"


def _table(
    heading: str, judged: _Judged, key: Callable[[Program], str], names: Sequence[str]
) -> Iterator[str]:
    yield f"| {heading} | programs | {' | '.join(_AIMS)} | false alarms |"
    yield "|---" * (len(_AIMS) + 3) + "|"
    for name in names:
        scores = [score for program, score in judged if key(program) == name]
        if scores:
            shares = " | ".join(_percent(scores, field) for field in _AIMS)
            alarms = sum(each.false_alarm for each in scores)
            yield f"| {name} | {len(scores)} | {shares} | {alarms} |"


def _failures(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        chosen = result.program
        what = [result.error] if result.score is None else result.score.why
        if what:
            yield f"- {chosen.seed}:{chosen.number} ({chosen.title}): {'; '.join(what)}"


def _percent(scores: Sequence[Score], field: str) -> str:
    return f"{sum(getattr(each, field) for each in scores) / len(scores):.0%}" if scores else ""
