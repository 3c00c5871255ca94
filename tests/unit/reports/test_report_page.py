"""The report's page as text: its content, its safety against hostile names, and its size."""

import base64
import dataclasses
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import fuzzed_run
from support.journals import GIB, MIB, MadeRun, at, batch, cuda, finished_run
from support.models import mlp
from support.training import Case, squares, traced

from memlog._internal.npm_package import UPLOT
from memlog._internal.processes import RankPosition
from memlog._internal.terminal import format_bytes
from memlog.cli.main import cli
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.events import (
    Alert,
    Device,
    End,
    Epoch,
    Finding,
    Origin,
    Parameters,
    Run,
    Sample,
    Trace,
    TracedLayer,
)
from memlog.journal import RunDirectory
from memlog.reports.page import comparison_html, html
from memlog.reports.page.drawings import CurveFold
from memlog.reports.page.facts import RunReader, run_series
from memlog.reports.page.layers import event_tree

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """A page's elements: name, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.inside = False
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        self.inside = True

    def handle_data(self, data: str) -> None:
        if self.elements and self.inside:
            self.elements[-1][2].append(data)

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - the parser's
        self.inside = False

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, "".join(text)) for name, attrs, text in self.elements if name == tag]

    @property
    def data(self) -> Any:
        [text] = [text for attrs, text in self.all("script") if attrs.get("id") == "data"]
        return json.loads(text)

    def headline(self) -> str:
        found = re.search(r"<h1[^>]*>(.*?)</h1>", self.text, re.DOTALL)
        assert found is not None
        return re.sub(r"<[^>]+>", "", found[1])


@pytest.fixture
def without_uplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without uPlot, of a user without npm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    elsewhere = dataclasses.replace(UPLOT, installed=tmp_path / "nowhere")
    monkeypatch.setattr("memlog.reports.page.page.UPLOT", elsewhere)


def growing_run(root: Path) -> RunDirectory:
    made = MadeRun(root)
    made.write(Run(at(0), "gpt", None, (), {}))
    for step in range(60):
        made.write(batch(step, GIB + step * MIB))
    made.write(
        Finding(
            *(at(6), 59, "kept_graph", "`losses`, a list in `train()`, gains 6 tensors. Each"),
            *("losses", 10, float(MIB), (4_000, 5_000), 8 * GIB, ("it has 60 tensors",), "high"),
            "Keep only its number (`.item()`).",
        )
    )
    return made.write(End(at(7), "finished")).closed()


def test_the_verdict_is_the_headline_and_the_remedy_follows(tmp_path: Path) -> None:
    page = Page(html(growing_run(tmp_path)))
    assert page.headline() == "losses, a list in train(), gains 6 tensors."
    assert "What to do: " in page.text
    assert "<code>.item()</code>" in page.text
    assert "it has 60 tensors" in page.text


def test_a_journal_that_is_read_as_it_grows_gives_the_same_page(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, alive=True, segment_bytes=20_000)
    run = made.directory
    reader = RunReader(run)
    for step in range(400):
        made.write(batch(step, GIB + step * MIB))
        made.sampled(Sample(at(step), step, 2 * GIB, 3, GIB, None, None, host_limit=8 * GIB))
        if step % 3 == 0:
            reader.read(5)
    made.write(End(at(401), "finished"))
    made.closed()
    assert html(reader) == html(run)


def test_only_its_own_script_runs_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = Page(html(finished_run(tmp_path)))
    [policy] = [
        attrs["content"]
        for attrs, _ in page.all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'"
    [script] = [text for attrs, text in page.all("script") if "type" not in attrs]
    [style] = [text for _, text in page.all("style")]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {"base-uri": "'none'", "form-action": "'none'"}
    addresses = [
        value
        for _, attrs, _ in page.elements
        for name, value in attrs.items()
        if name in ("src", "href", "srcset", "action", "style") or name.startswith("on")
    ]
    assert addresses == ["#main"]


def test_without_data_it_is_below_300_kilobytes(tmp_path: Path) -> None:
    page = Page(html(finished_run(tmp_path)))
    own = sum(len(text) for tag in ("script", "style") for _, text in page.all(tag))
    assert own < 300_000
    assert len(page.text.encode()) < 300_000


def test_what_a_journal_says_is_text(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(
        Run(at(0), HOSTILE, HOSTILE, (), {}),
        Parameters(at(0), {HOSTILE: HOSTILE}),
        *(batch(step, GIB) for step in range(20)),
        Alert(at(3), 5, "warning", HOSTILE, HOSTILE, f"{HOSTILE}\x1b[2J", 1.0),
        Trace(
            *(at(3), 7, "dispatch", True, 8, {HOSTILE: 8}),
            *((TracedLayer(HOSTILE, 8, 8, 8, 8),), 0),
        ),
    )
    page = Page(html(made.write(End(at(4), "finished")).closed()))
    assert page.all("img") == []
    assert len(page.all("script")) == 2
    assert page.data["tree"]["root"][4][0][0] == HOSTILE
    assert "\x1b" not in page.text


def test_a_long_run_is_drawn_with_its_extremes_in_little_data(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, segment_bytes=2**24)
    for step in range(9_000):
        made.write(batch(step, 3 * GIB if step == 7_531 else GIB - (step == 2_345) * MIB))
    page = Page(html(made.write(End(at(901), "finished")).closed()))
    [chart] = page.data["charts"]
    level = chart["curves"][0]
    assert len(chart["x"]) <= 2_000
    assert (min(level["low"]), max(level["high"])) == (GIB - MIB, 3 * GIB)
    at_peak = level["high"].index(3 * GIB)
    assert chart["x"][at_peak] <= 7_531 < chart["x"][at_peak] + chart["width"]
    assert len(json.dumps(page.data)) < 200_000
    assert "each point shows the lowest and the highest of 8 steps" in page.text


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200), st.integers(1, 16))
def test_intervals_keep_the_lowest_and_the_highest(values: list[int], most: int) -> None:
    fold = CurveFold(most)
    for index, value in enumerate(values):
        fold.add("line", "level", index, value)
    chart = fold.chart("host", "Host", None)
    assert len(chart.x) <= most
    for number, begin in enumerate(chart.x):
        piece = values[begin : begin + chart.width]
        low = chart.main.high if chart.main.low is None else chart.main.low
        assert (low[number], chart.main.high[number]) == (min(piece), max(piece))


def test_marks_lie_at_their_steps(tmp_path: Path) -> None:
    series = run_series(finished_run(tmp_path))
    marks = {(mark.kind, mark.at) for mark in series.marks}
    assert {("alert", 150), ("epoch", 199), ("file", 199)} <= marks
    assert [chart.id for chart in series.charts] == ["cuda0", "host"]
    assert [chart.limit for chart in series.charts] == [80 * GIB, 16 * GIB]


def test_only_listed_marks_count_as_left_out(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(600)))
    made.write(*(Epoch(at(60), epoch, epoch, GIB, GIB, "exact") for epoch in range(600)))
    made.write(Alert(at(60), 5, "info", "r", "the only mark in the list", ""))
    text = html(made.closed())
    assert "the only mark in the list" in text
    assert "more</li>" not in text


def test_the_ranks_of_a_job_are_side_by_side(tmp_path: Path) -> None:
    for rank, job in ((0, "a"), (1, "a"), (0, "b")):
        made = MadeRun(tmp_path, f"{job}{rank}777777").ranked(RankPosition(rank, 2, job))
        made.write(
            Device(at(0), "cuda0", "H100", 80 * GIB),
            Parameters(at(0), {"rank": str(rank), "world_size": "2"}),
            *(batch(step, GIB, cuda((rank + 1) * GIB)) for step in range(12)),
        )
        made.write(End(at(4), "finished")).closed()
    page = Page(html(RunDirectory(tmp_path / "a0777777")))
    assert "2 ranks side by side" in page.text
    assert "The highest and the lowest peak are 1.0 GiB apart." in page.text
    assert [chart["id"] for chart in page.data["charts"]] == ["cuda0", "host", "ranks"]
    assert [curve["label"] for curve in page.data["charts"][2]["curves"]] == ["rank 0", "rank 1"]
    assert "b0777777" not in page.text


def test_of_many_ranks_those_with_the_most_and_the_least_memory_are_shown(tmp_path: Path) -> None:
    sizes = {rank: GIB + rank * MIB for rank in range(70)} | {67: 3 * GIB, 69: MIB}
    for rank, size in sizes.items():
        made = MadeRun(tmp_path, f"rank{rank:04}").ranked(RankPosition(rank, 70, "a"))
        made.write(batch(0, size), batch(1, size), End(at(4), "finished")).closed()
    first = RunDirectory(tmp_path / "rank0000")
    publish_afterwards(first)
    page = Page(html(first))
    assert "64 of 70 ranks side by side" in page.text
    shown = {curve["label"] for curve in page.data["charts"][-1]["curves"]}
    assert shown == {f"rank {rank}" for rank in (*range(62), 67, 69)}


@pytest.mark.usefixtures("without_uplot")
def test_without_uplot_it_is_drawn_without_zoom_and_names_the_remedy(tmp_path: Path) -> None:
    page = Page(html(finished_run(tmp_path), announce=pytest.fail))
    assert "These charts can't be zoomed: npm is not installed: install npm" in page.text
    assert len([attrs for attrs, _ in page.all("svg") if attrs["class"] == "static"]) == 2
    assert "As a table" in page.text


def compared(root: Path) -> Page:
    first, second = (RunDirectory(root / run_id) for run_id in ("aaaaaaaa", "bbbbbbbb"))
    return Page(comparison_html(first, second))


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for run_id, size in (("aaaaaaaa", GIB), ("bbbbbbbb", 2 * GIB)):
        made = MadeRun(tmp_path, run_id)
        made.write(*(batch(step, size) for step in range(12)))
        made.write(
            Trace(
                *(at(3), 7, "dispatch", True, size // 2, {"activations": size // 2}),
                *((TracedLayer("head", size // 4, 8, 8, 8),), 0),
            ),
            End(at(4), "finished"),
        ).closed()
    page = compared(tmp_path)
    assert page.headline() == (
        "The peak in tensors of bbbbbbbb is 512.0 MiB (100.0 %) higher than that of aaaaaaaa: "
        "1.0 GiB against 512.0 MiB."
    )
    [chart] = page.data["charts"]
    assert [curve["label"] for curve in chart["curves"]] == ["run aaaaaaaa", "run bbbbbbbb"]
    assert page.text.count("+256.0 MiB") == 1  # of the layer
    assert page.text.count("+512.0 MiB") == 2  # of the peak, and of the category


def test_a_short_run_beside_a_long_one_is_a_dot(tmp_path: Path) -> None:
    for run_id, count in (("aaaaaaaa", 3), ("bbbbbbbb", 8_000)):
        made = MadeRun(tmp_path, run_id, segment_bytes=2**24)
        made.write(*(batch(step, GIB) for step in range(count)), End(at(9), "finished")).closed()
    page = compared(tmp_path)
    [(dot, _)] = page.all("circle")
    assert dot["class"] == "line n0"
    assert [attrs["class"] for attrs, _ in page.all("polyline")] == ["line n1"]


def test_what_only_one_run_traced_is_not_compared(tmp_path: Path) -> None:
    traced_step = Trace(
        *(at(3), 7, "dispatch", True, GIB, {"activations": GIB}),
        *((TracedLayer("head", GIB, 8, 8, 8),), 0),
    )
    for run_id, more in (("aaaaaaaa", [traced_step]), ("bbbbbbbb", [])):
        made = MadeRun(tmp_path, run_id)
        made.write(*(batch(step, GIB) for step in range(12)), *more, End(at(4), "finished"))
        made.closed()
    page = compared(tmp_path)
    sections = {attrs["class"] for attrs, _ in page.all("section")}
    assert sections == {"part memory", "part figures"} | {
        f"part origin-{run_id}" for run_id in ("aaaaaaaa", "bbbbbbbb")
    }


def test_the_command_has_a_line_of_its_own(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.write(*(batch(step, GIB) for step in range(12)), End(at(4), "finished"))
    origin = Origin(at(0), "python train.py --lr 1", "3.11.7", "node1", "c0ffee", True, "src")
    made.sampled(origin).closed()
    page = Page(html(made.directory))
    facts = re.search(r'<dl class="facts long">(.*?)</dl>', page.text)
    assert facts is not None
    assert "<dt>command</dt><dd>python train.py --lr 1</dd>" in facts[1]
    for name, value in (
        ("git commit", "c0ffee"), ("git uncommitted changes", "True"), ("working directory", "src"),
    ):  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page.text


def test_equal_layers_stand_in_the_order_of_their_numbers() -> None:
    paths = [f"h.{number}" for number in (10, 2, 1)]
    layers = tuple(TracedLayer(path, GIB, 8, 8, 8) for path in paths)
    tree = event_tree(Trace(at(3), 7, "dispatch", True, 3 * GIB, {"activations": GIB}, layers, 0))
    assert tree is not None
    assert [node.name for node in tree.children] == ["h.1", "h.2", "h.10"]


def test_damaged_runs_have_a_page(tmp_path: Path) -> None:
    for seed in range(25):
        page = Page(html(fuzzed_run(tmp_path / str(seed), seed)))
        assert page.headline()


def test_the_command_writes_the_page_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished_run(tmp_path / "runs")
    done = CliRunner().invoke(cli, ["report", "latest", "--dir", "runs", "-o", "my report.html"])
    assert done.exit_code == 0, done.output
    assert re.fullmatch(
        rf"wrote my report\.html \([\d.]+ KiB\): open {re.escape(tmp_path.as_uri())}/my%20report\.html\n",
        done.stdout,
    )
    assert Page((tmp_path / "my report.html").read_text("utf-8")).headline().startswith("Unsure: ")
    wrong = CliRunner().invoke(cli, ["report", "a", "b", "c"])
    assert wrong.exit_code == 2


def test_a_traced_step_has_a_page_of_its_own() -> None:
    trace = traced(Case(lambda: mlp(16, 2), lambda batch: torch.randn(batch, 16), squares, 8))
    page = Page(html(trace))
    peak = format_bytes(trace.result.peak)
    assert page.headline().startswith(f"Sequential needs {peak} at its peak on cpu: ")
    tree = page.data["tree"]["root"]
    assert tree[1] == trace.result.peak == sum(child[1] for child in tree[4])
    assert leaves(tree) == trace.result.categories
    assert "What would help" in page.text


def leaves(node: list[Any]) -> dict[str, int]:
    """Bytes of a packed tree by category."""
    name, size, colour, _, children = node
    if colour:
        return {name: size}
    found: Counter[str] = Counter()
    for child in children:
        found.update(leaves(child))
    return dict(found)
