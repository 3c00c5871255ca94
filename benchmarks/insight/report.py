"""The report of a run of the benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.__main__ import machine
from benchmarks.insight.expected import Expected
from benchmarks.insight.scoring import Score, Summary, summarise
from benchmarks.insight.series import MIB

if TYPE_CHECKING:
    from benchmarks.insight.run import Result

PREFACE = """# How well memlog explains growth

Written by `make insight`. Each script of `benchmarks/insight/scripts` runs through `memlog run --layers` with
default settings, and `memlog show --json` is compared with `benchmarks/insight/expected.toml`, the truth
about it: faulty or healthy, the kinds of findings that name the cause, the texts that name the place, and the
source of the pattern. The growth per step is measured without memlog (`RssAnon` and `RssShmem` of the process
and its children after each optimizer step).

A fault counts as detected if a finding has a rate of growth; in scripts that waste memory without growing, if
a finding has an expected kind. Any finding on a healthy script is a false alarm. Cause, place, rate and
forecast are those of the first finding that detects the fault. The forecast is compared with the step at
which the measured growth reaches the limit. Cost is the time of the whole process with memlog divided by the
time without.

"""
ON_DEVICE = "## On a device\n"
GENERATED = "## Generated programs\n"
DEVICE_PREFACE = """
Written by `make insight ARGS="--device cuda"`. The same scripts with their tensors on a GPU
(`torch.set_default_device`). The device is simulated ([how](gpu-checks.md)): torch's allocator and all of
memlog are real, kernels compute nothing. So the scripts' values mean nothing, and there are no times. The
growth is that of the host's memory plus that of the tensors on the device (`torch.cuda.memory_allocated`).
"""


def put_into(file: Path, text: str, device: str) -> None:
    """Replace the part about a device in the page, or, for the CPU, the part before it.

    What follows, about generated programs, stays.
    """
    page, heading, generated = (file.read_text() if file.exists() else "").partition(GENERATED)
    before, _, on_device = page.partition(ON_DEVICE)
    if device == "cpu":
        before = PREFACE + text + "\n\n"
    else:
        on_device = f"{DEVICE_PREFACE}\n{text}\n".replace("\n## ", "\n### ")
    scripts = f"{before.rstrip()}\n" + (f"\n{ON_DEVICE}{on_device.rstrip()}\n" if on_device else "")
    file.write_text(scripts + (f"\n{heading}{generated}" if heading else ""))


def text(
    table: dict[str, Expected],
    results: Sequence[Result],
    seeds: int,
    left_out: Sequence[str] = (),
    not_run: Sequence[str] = (),
) -> str:
    """Return the machine, the summary, and a table of the faulty and one of the healthy scripts.

    ``left_out`` are scripts that can't run on the device, ``not_run`` those that ``--only`` leaves out.
    """
    first = [result for result in results if result.seed == 0]
    parts = [machine(), summary_table(_summary(results)), "## Faulty scripts", faulty(table, first)]
    parts += [
        f"## Healthy scripts, {seeds} {'seed' if seeds == 1 else 'seeds'}",
        healthy(table, results),
    ]
    if left_out:
        listed = (f"- {name}: {table[name].not_on_device}." for name in left_out)
        parts += ["## Not on a device", "\n".join(listed)]
    if not_run:
        count = len({result.name for result in results})
        parts += [
            "## Not run",
            f"Of {count + len(not_run)} scripts, {len(not_run)}: {', '.join(not_run)}.",
        ]
    if failed := [result for result in results if result.error]:
        parts += ["## Failed", *(f"- {r.name}, seed {r.seed}: `{r.error}`" for r in failed)]
    return "\n\n".join(parts)


def _summary(results: Sequence[Result]) -> Summary:
    first = [r.score for r in results if r.score is not None and r.seed == 0]
    more = [r.score for r in results if r.score is not None and r.seed > 0]
    return summarise(first, more, [r.cost for r in results if r.cost is not None])


def summary_table(summary: Summary) -> str:
    """Return the figures over all scripts."""
    rows = {
        "recall": _percent(summary.recall),
        "precision": _percent(summary.precision),
        "cause named, of what is detected": _percent(summary.cause),
        "the best cause": _percent(summary.best_cause),
        "place named": _percent(summary.place),
        "error of the rate, median": _percent(summary.rate_error),
        f"error of the forecast, median of {summary.forecasts}": _percent(summary.forecast_error),
        "false alarms": f"{summary.false_alarms} in {summary.healthy_runs} runs",
        "time with memlog / without, median": "" if summary.cost is None else f"{summary.cost:.3f}",
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    )


def faulty(table: dict[str, Expected], results: Sequence[Result]) -> str:
    """Return a row for each faulty script."""
    lines = [
        "| script | expected | found | cause | place | MiB per step | error of the rate "
        "| of the forecast | cost |",
        "|" + "---|" * 9,
    ]
    for result in results:
        expected = table[result.name]
        if not expected.faulty or result.score is None:
            continue
        score = result.score
        low, high = expected.rate_mib
        rate = f"{result.rate / MIB:.2f}" if result.rate else f"{low:g} to {high:g}"
        cells = [
            f"[{result.name}]({expected.source})",
            expected.kinds[0],
            _found(score),
            _mark(score.cause),
            _mark(score.place),
            rate,
            _percent(score.rate_error),
            _percent(score.forecast_error),
            f"{result.cost:.2f}" if result.cost else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def healthy(table: dict[str, Expected], results: Sequence[Result]) -> str:
    """Return a row for each healthy script, over its seeds."""
    lines = ["| script | runs | false alarms | of kind | cost |", "|" + "---|" * 5]
    for name in dict.fromkeys(result.name for result in results if not table[result.name].faulty):
        runs = [r for r in results if r.name == name and r.score is not None]
        alarms = [r.score for r in runs if r.score is not None and r.score.false_alarm]
        kinds = ", ".join(sorted({str(score.kind) for score in alarms}))
        cost = next((f"{r.cost:.2f}" for r in runs if r.cost), "")
        link = f"[{name}]({table[name].source})"
        lines.append(f"| {link} | {len(runs)} | {len(alarms)} | {kinds} | {cost} |")
    return "\n".join(lines)


def _found(score: Score) -> str:
    if score.detected:
        return score.kind or ""
    return f"no ({score.kind})" if score.kind else "no"


def _mark(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
