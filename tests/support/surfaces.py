"""Statements of all surfaces about a run, and contradictions to the truth and among themselves."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from memlog._internal.terminal import format_bytes
from memlog.cli.main import cli
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.delivery.uploader.uploader import Uploader
from memlog.journal import RunDirectory
from memlog.reports.description import description
from support.planted_runs import Planted
from support.sinks import ListSink, ListTracker

SURFACES = (
    "show",
    "show --all",
    "show --brief",
    "show --json",
    "runs",
    "runs --json",
    "compare",
    "compare --json",
    "gate",
    "report",
    "advise",
    "watch",
    "watch --json",
    "tracker",
    "description",
    "alert",
    "post-mortem",
)
MOST_LINES = 25
"""Most lines of the page of ``memlog show``."""
_SIZE = r"(?:at least )?([\d,.]+ [KMGT]?i?B)"


class Said(NamedTuple):
    """One statement of one surface."""

    surface: str
    fact: str
    value: object


class _Describing(ListSink):
    """A tracker's run with a field for a description, as MLflow has."""

    described = ""

    def wants_description(self) -> bool:
        return True

    def log_description(self, text: str) -> None:
        type(self).described = text


def statements(run: RunDirectory, *, delivered: bool = True) -> Iterator[Said]:
    """Yield what each surface says about a run. ``delivered``: also deliver the run to a tracker."""
    for surface, found in (
        ("show", _show(output("show", run, run.id))),
        ("show --all", _show_all(output("show", run, run.id, "--all"))),
        ("show --brief", _brief(output("show", run, run.id, "--brief"))),
        ("show --json", _document(json.loads(output("show", run, run.id, "--json")))),
        ("runs", _runs(output("runs", run), run.id)),
        ("runs --json", _listed(json.loads(output("runs", run, "--json")), run.id)),
        ("compare", _compare(output("compare", run, run.id, run.id))),
        ("compare --json", _compared(json.loads(output("compare", run, run.id, run.id, "--json")))),
        ("gate", _gate(run)),
        ("report", _report(run)),
        ("advise", _advise(run)),
        ("watch", _watch(output("watch", run, "--once", run.id))),
        ("watch --json", _watched(json.loads(output("watch", run, "--once", "--json", run.id)))),
        ("tracker", _tracker(run) if delivered else iter(())),
        ("description", described(description(run, "mlflow"))),
        ("alert", _alert(run)),
        ("post-mortem", _postmortem(run)),
    ):
        for fact, value in found:
            yield Said(surface, fact, value)


class Truth(NamedTuple):
    """What is true of a run, as far as surfaces tell it."""

    facts: Mapping[str, object]
    """Values by the names of facts."""
    rising: tuple[str, ...] = ()
    """Names of the memory that rises until the end."""
    is_healthy: bool = False
    """True if no memory rises, so that a finding of growth is a false alarm."""
    holder: str | None = None
    """Text that the first line must contain, because memlog has found this."""
    suspects: tuple[str, ...] = ()
    """Texts of which a named cause must contain one. memlog may also name no cause."""
    ends_with: tuple[str, ...] = ()
    """Beginnings of the first line, of which it must have one; empty: any."""
    has_ended: bool = True
    has_report: bool = False
    """True if texts about the run's end must tell how memory rose."""
    has_limit: bool = False
    """True if the run's control group has a limit."""
    rise_since: Callable[[str | None, int], float] | None = None
    """Function that returns the bytes by which memory rose from a step to the end: that of a device, or the
    main one if the name is ``None``. ``None``: unknown."""


def truth_of(planted: Planted) -> Truth:
    """Return the truth about a made-up journal."""
    main = planted.failed_on or next((name for name in planted.courses if name != "host"), "host")
    return Truth(
        facts_of(planted),
        tuple(planted.rising),
        planted.is_healthy,
        planted.holder,
        ends_with=_BEGINNINGS.get(planted.ending, ()),
        has_ended=planted.status != "running",
        has_report=planted.ending == "killed",
        has_limit=bool(planted.first),
        rise_since=lambda device, step: planted.courses[device or main].rise(
            step - planted.first, planted.last - planted.first
        ),
    )


_BEGINNINGS: dict[str, tuple[str, ...]] = {
    "out of memory": ("Out of memory", "Rank 0 ran out of memory"),
    "killed": ("Ended unexpectedly", "Rank 0 ended unexpectedly", "Rank 0 was killed by SIGKILL"),
    "stopped": ("Interrupted", "Rank 0 was interrupted"),
}


def contradictions(run: RunDirectory, planted: Planted) -> list[str]:
    """Return a sentence about each statement that is not true, and about each two that differ.

    The run is explained first, as ``memlog sync`` does it if the helper process died with the trainer.
    """
    publish_afterwards(run)
    explain_afterwards(run)
    said = [*statements(run)]
    return [*against(truth_of(planted), said), *among_themselves(said)]


def among_themselves(said: Sequence[Said]) -> Iterator[str]:
    """Yield a sentence about each fact that two surfaces tell differently."""
    by_fact: defaultdict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in said:
        if not each.fact.startswith("_"):
            by_fact[each.fact][_written(each.value)].append(each.surface)
    for fact, told in by_fact.items():
        if len(told) > 1:
            versions = "; ".join(f"{', '.join(who)}: {what}" for what, who in told.items())
            yield f"{fact}: {versions}"


def against(truth: Truth, said: Sequence[Said]) -> Iterator[str]:
    """Yield a sentence about each group of surfaces that contradict the truth in the same way."""
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for each in said:
        for what in _wrong(truth, each):
            wrong[what].append(each.surface)
    growth = next((str(e.value).partition(". ")[2] for e in said if e.fact == "verdict"), "")
    for each in said:
        if each.fact == "_bad end" and truth.rising and growth:
            for what in _wrong_end(truth, str(each.value), growth):
                wrong[what].append(each.surface)
    yield from (f"{', '.join(dict.fromkeys(who))}: {what}" for what, who in wrong.items())


def _wrong(truth: Truth, each: Said) -> Iterator[str]:
    if each.fact in truth.facts and _written(each.value) != _written(truth.facts[each.fact]):
        known = _written(truth.facts[each.fact])
        yield f"{each.fact} is {_written(each.value)}, in truth {known}"
    if each.fact == "verdict":
        yield from (f"{what}: {each.value}" for what in wrong_verdict(truth, str(each.value)))
    if each.fact == "_lines" and int(str(each.value)) > MOST_LINES:
        yield f"{each.value} lines"
    if each.fact == "_first peak" and each.value == "host.cgroup" and not truth.has_limit:
        yield "the first row is the whole machine's memory"


def _wrong_end(truth: Truth, text: str, growth: str) -> Iterator[str]:
    """Yield what a text about a bad end gets wrong if memory rose until then."""
    text = plain(text)
    if "Nothing points to memory" in text:
        yield f"nothing points to memory, but it rose ({', '.join(truth.rising)})"
    if truth.has_report and plain(growth) not in text:
        yield f"lacks the growth: {growth}"


def facts_of(truth: Planted) -> dict[str, object]:
    """Return the values that surfaces must tell, by the names of facts."""
    facts: dict[str, object] = {
        "status": truth.status,
        "steps": truth.steps,
        "last step": truth.last,
        "traced steps": truth.traced,
        **{f"peak of {kind}": size for kind, size in truth.peaks.items()},
        **{f"shown peak of {kind}": format_bytes(size) for kind, size in truth.peaks.items()},
    }
    if truth.worst is not None:
        step, size, exact = truth.worst
        facts |= {
            "worst traced step": step,
            "traced peak": size,
            "shown traced peak": format_bytes(size),
            "exact": exact,
        }
    if truth.name is not None:
        facts["name"] = truth.name
    return facts


def wrong_verdict(truth: Truth, text: str) -> Iterator[str]:
    """Yield what is wrong with the first line about a run, without markup."""
    grows = re.search(
        r"([^.]*(?:\.py[^.]*)?)\. Memory grows by|grows by [\d.]+ [KMG]?i?B a step", text
    )
    if truth.holder is not None and plain(truth.holder) not in text:
        yield "the cause is missing"
    if truth.is_healthy and " a step since step" in text:
        yield "a false alarm"
    names_another = not any(each in text for each in truth.suspects)
    if truth.suspects and grows and grows[1] and names_another:
        yield f"a wrong cause, in truth {truth.suspects[0]}"
    if truth.ends_with and not text.startswith(truth.ends_with):
        yield f"it does not begin with {truth.ends_with[0]!r}"
    if "runs out at" in text and truth.has_ended:
        yield "a forecast for a run that has ended"
    if "No growth" in text:
        yield from _wrong_all_clear(truth, text)


def _wrong_all_clear(truth: Truth, text: str) -> Iterator[str]:
    cleared = re.search(
        r"steady since step ([\d,]+) .*a rise of more than ([\d.]+ [KMGT]?i?B) is excluded", text
    )
    if truth.rising:
        yield f"an all-clear, but memory rose ({', '.join(truth.rising)})"
    elif cleared is None:
        yield "an all-clear without evidence"
    elif truth.rise_since is not None:
        told = re.search(r" on (\w+), steady since", text)  # of several devices: the fullest
        rise = truth.rise_since(told and told[1], _number(cleared[1]))
        if rise > 1.05 * _bytes(cleared[2]):
            yield f"the evidence excludes {cleared[2]}, but the rise is {format_bytes(rise)}"


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def _written(value: object) -> str:
    return str(value)


def plain(text: str) -> str:
    """Return a text without markup, and with one space between words."""
    return " ".join(re.sub(r"[`*\\]|<[^>]*>", "", text).split())


def output(command: str, run: RunDirectory, *arguments: str) -> str:
    found = CliRunner().invoke(
        cli, [command, *arguments, "--dir", str(run.path.parent)], catch_exceptions=False
    )
    return found.stdout


Facts = Iterator[tuple[str, object]]


def _show(text: str) -> Facts:
    lines = text.splitlines()
    yield "_lines", len(lines)
    yield from _verdict(lines[0])
    yield from _head(text)
    rows = re.findall(rf"^  (\w+\.\w+) +{_SIZE}", text, re.MULTILINE)
    if rows:
        yield "_first peak", rows[0][0]
    for kind, size in rows:
        yield f"shown peak of {kind}", size
    traced = re.search(
        rf"{_SIZE} in tensors(?: on \w+)? \((exact|lower bound)\), step ([\d,]+): "
        r"(the only|the worst of ([\d,]+))",
        text,
    )
    if traced:
        yield "shown traced peak", traced[1]
        yield "exact", traced[2] == "exact"
        yield "worst traced step", _number(traced[3])
        yield "traced steps", _number(traced[5] or "1")


def _show_all(text: str) -> Facts:
    for fact, value in _show(text):
        if fact != "_lines":
            yield fact, value


def _brief(text: str) -> Facts:
    told = dict(line.split(": ", 1) for line in text.splitlines())
    if not told["verdict"].endswith("…"):
        yield from _verdict(told["verdict"])
    _, status, counted = told["run"].split(", ", 2)
    yield "status", status
    yield "steps", _number(counted.split()[0])


def _head(text: str) -> Facts:
    head = re.search(r"^run \S+  (\w+)(?:  (.*))?$", text, re.MULTILINE)
    counted = re.search(r"([\d,]+) steps?(?: \([\d,]+ to ([\d,]+)\))? in (.*)$", text, re.MULTILINE)
    if head:
        yield "status", head[1]
        if head[2] and ", " in head[2]:
            yield "name", head[2].rpartition(", ")[2]
    if counted:
        yield "steps", _number(counted[1])
        yield "shown duration", counted[3]
        if counted[2]:
            yield "last step", _number(counted[2])


def _verdict(text: str) -> Facts:
    yield "verdict", plain(text)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _document(document: Mapping[str, Any]) -> Facts:
    yield from _verdict(document["verdict"])
    yield "status", document["status"]
    yield "steps", document["steps"]
    yield "last step", document["last_step"]
    for kind, peak in document["peaks"].items():
        if peak["bytes"] is not None:
            yield f"peak of {kind}", peak["bytes"]
    traced = document["traced"]
    yield "traced steps", traced["steps"]
    if traced["steps"]:
        yield "worst traced step", traced["worst_step"]
        yield "traced peak", traced["worst_peak_bytes"]
        yield "exact", traced["worst_exact"]
    yield from _findings(document["findings"])


def _findings(findings: list[Mapping[str, Any]]) -> Facts:
    yield "findings", [(each["kind"], each["where"], each["rate"]) for each in findings]


def _runs(text: str, run_id: str) -> Facts:
    line = next(line for line in text.splitlines() if line.startswith(run_id))
    cells = re.split(r"  +", line)
    yield "status", cells[2]
    yield "steps", _number(cells[4])
    yield "shown peak of host.rss", cells[5]


def _listed(document: Mapping[str, Any], run_id: str) -> Facts:
    line = next(each for each in document["runs"] if each["id"] == run_id)
    yield "status", line["status"]
    yield "steps", line["steps"]
    yield "peak of host.rss", line["host_peak_bytes"]


def _compare(text: str) -> Facts:
    status = re.search(r"^status +(\w+)", text, re.MULTILINE)
    if status:
        yield "status", status[1]
    host = re.search(rf"^host\.rss +{_SIZE}", text, re.MULTILINE)
    if host:
        yield "shown peak of host.rss", host[1]
    noted = re.search(r"its figures are of ([\d,]+) steps", text)
    if noted:
        yield "steps", _number(noted[1])


def _compared(document: Mapping[str, Any]) -> Facts:
    first = document["runs"][0]
    yield "status", first["status"]
    yield "steps", first["steps"]
    if first["traced_peak"] is not None:
        yield "traced peak", first["traced_peak"]
    for name, figure in document["figures"].items():
        owner, _, measure = name.rpartition(".")
        value = figure["values"][0]
        if value is None or owner == "device":
            continue
        if measure == "peak" and owner != "trace":
            yield f"peak of {owner}.allocated", value
        elif name in ("host.rss", "host.tree", "host.cgroup") or measure == "reserved":
            yield f"peak of {name}", value


def _gate(run: RunDirectory) -> Facts:
    arguments = [run.id, run.id, "--json", "--fail-if", "host.rss >= +0%", "--allow-unfinished"]
    document = json.loads(output("compare", run, *arguments))
    [gate] = document["gates"]
    yield "peak of host.rss", gate["value"]
    yield "_gate failed", gate["failed"]
    judged = CliRunner().invoke(
        cli,
        ["compare", run.id, run.id, "--fail-if", "host.rss > +0%", "--dir", str(run.path.parent)],
    )
    unfinished = re.search(r"is not finished \((\w+)\)", judged.output + str(judged.exception))
    yield "status", unfinished[1] if unfinished else "finished"


def _report(run: RunDirectory) -> Facts:
    file = run.path.parent / f"{run.id}.html"
    output("report", run, run.id, "-o", str(file))
    page = file.read_text("utf-8")
    file.unlink()
    shown = re.search(r'<h1 class="verdict[^>]*>(.*?)</h1>(?:<p class="lead">(.*?)</p>)?', page)
    assert shown is not None
    yield from _verdict(plain(_text(f"{shown[1]} {shown[2] or ''}")))
    header = page.partition("<header")[2].partition("<main")[0]
    pill = re.search(r'class="pill (\w+)"', header)
    if pill:
        yield "status", pill[1]
    names = _text(" ".join(re.findall(r"<strong>(.*?)</strong>|<span>(.*?)</span>", header)[0]))
    if ", " in names:
        yield "name", names.strip().rpartition(", ")[2]
    tiles = re.findall(
        r"<div><dt>(.*?)</dt><dd>(.*?)</dd>(?:<dd class=\"remark\">(.*?)</dd>)?", page
    )
    for name, value, remark in tiles:
        if name.startswith("Peak, "):
            owner = name.removeprefix("Peak, ")
            kind = "host.rss" if owner == "process" else f"{owner}.allocated"
            yield f"shown peak of {kind}", value
        elif name.startswith("Peak in tensors"):
            yield "shown traced peak", value
            yield "exact", "at least" not in name
            step = re.match(r"step ([\d,]+)", remark)
            if step:
                yield "worst traced step", _number(step[1])
        elif name == "Steps":
            yield "steps", _number(value)
            yield "shown duration", remark
    worst = re.search(r"Worst at step ([\d,]+):", page)
    if worst:
        yield "worst traced step", _number(worst[1])


def _text(markup: str) -> str:
    import html

    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def _advise(run: RunDirectory) -> Facts:
    if not run.worst_step.exists():
        return
    document = json.loads(output("advise", run, run.id, "--json"))
    yield "worst traced step", document["step"]
    yield "traced peak", document["advice"]["traced_peak"]
    yield "traced steps", document["standing"]["traced_steps"]
    text = output("advise", run, run.id)
    shown = re.match(rf"run \S+, step ([\d,]+): {_SIZE} at the peak", text)
    if shown:
        yield "worst traced step", _number(shown[1])
        yield "shown traced peak", shown[2]


def _watch(text: str) -> Facts:
    head = re.search(r"^run \S+  (\w+)", text, re.MULTILINE)
    if head:
        yield "status", head[1]
    step = re.search(r"^step ([\d,]+)", text, re.MULTILINE)
    if step:
        yield "last step", _number(step[1])
    rows = re.findall(rf"^(host\.\w+|[a-z]+\d+) +{_SIZE} +{_SIZE}", text, re.MULTILINE)
    for name, _, peak in rows:
        kind = name if "." in name else f"{name}.allocated"
        yield f"shown peak of {kind}", peak
    ended = re.search(
        r"^run \S+ (has finished|has failed|was killed|is still running)", text, re.MULTILINE
    )
    if ended:
        words = {"has finished": "finished", "has failed": "failed", "was killed": "killed"}
        yield "status", words.get(ended[1], "running")


def _watched(document: Mapping[str, Any]) -> Facts:
    yield from _verdict(document["verdict"])
    yield "status", document["status"]
    yield "last step", document["step"]
    for each in document["memory"]:
        kind = each["name"] if "." in each["name"] else f"{each['name']}.allocated"
        if each["peak_bytes"] is not None:
            yield f"peak of {kind}", each["peak_bytes"]
    yield from _findings(document["findings"])


def _tracker(run: RunDirectory) -> Facts:
    """Deliver the run to a tracker in memory, and tell what the tracker then has."""
    if run.is_alive():
        return
    tracker = ListTracker()
    uploader = Uploader(
        run, "mlflow", lambda target: _Describing(tracker, target), begun_us=1, may_open_own=True
    )
    uploader.deliver(complete=True)
    uploader.close()
    [(run_id, points)] = tracker.points.items()
    if tracker.ended[run_id] is not None:
        yield "status", tracker.ended[run_id]
    rss = [p.value for p in points if p.name == "memory/host/rss_mib"]
    peaks = [p.value for p in points if p.name == "memory/host/rss_peak_mib"]
    yield "_points of rss", len(rss)
    for name in {p.name for p in points if re.fullmatch(r"memory/\w+\d/peak_mib", p.name)}:
        device = name.split("/")[1]
        most = max(p.value for p in points if p.name == name)
        yield f"_sent peak of {device}.allocated", round(most * 1024**2)
    if peaks:
        yield "_sent peak of host.rss", round(max(peaks) * 1024**2)
    steps = [p.index for p in points if p.axis == "step" and p.name.startswith("memory/host")]
    if steps:
        yield "last step", max(steps)
    if _Describing.described:
        yield from described(_Describing.described)


def described(text: str) -> Facts:
    first = re.match(r"\*\*(.*)\*\*$", text.splitlines()[0])
    assert first is not None, text
    yield from _verdict(first[1])
    row = re.search(r"^\| Run \| (\w+), ([\d,]+) steps(?: in (.*?))? \|", text, re.MULTILINE)
    if row:
        yield "status", row[1]
        yield "steps", _number(row[2])
        yield "shown duration", row[3]
    host = re.search(rf"^\| Peak of the process \| {_SIZE}", text, re.MULTILINE)
    if host:
        yield "shown peak of host.rss", host[1]
    for device, size in re.findall(rf"^\| Peak on (\w+) \| {_SIZE}", text, re.MULTILINE):
        yield f"shown peak of {device}.allocated", size
    traced = re.search(
        r"^\| Step ([\d,]+), traced \| (at least )?([\d.]+ \w+) in", text, re.MULTILINE
    )
    if traced:
        yield "worst traced step", _number(traced[1])
        yield "exact", not traced[2]
        yield "shown traced peak", traced[3]


def _alert(run: RunDirectory) -> Facts:
    """Tell what the newest alert about a bad end says."""
    document = json.loads(output("show", run, run.id, "--json"))
    for alert in document["alerts"]:
        if alert["rule"] in ("ended unexpectedly", "out of memory"):
            yield "_bad end", f"{alert['title']}. {alert['text']}"
            yield "_title", alert["title"]


def _postmortem(run: RunDirectory) -> Facts:
    file = Path(run.artifacts / "postmortem.md")
    if file.exists():
        text = file.read_text("utf-8")
        yield "_bad end", text
        yield "_title", text.splitlines()[0].removeprefix("# ")


def shown_verdict(run: RunDirectory) -> str:
    """Return the first line of ``memlog show``."""
    return output("show", run, run.id).splitlines()[0]
