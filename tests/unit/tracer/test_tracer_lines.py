"""Code outside all modules is named by the line of the program that called it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memlog import MemoryTracer
from memlog.trace.exporters.profiles import flame_graph
from memlog.trace.records import RecordedTrace, Share
from memlog.trace.summary import summary_text
from memlog.tracer.schedule.kept_trace import TOP_LINES, trace_event
from memlog.tracer.window import TraceWindow

WORDS = 2000


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.mix(self.embedding(tokens)).tanh()
        return out


def train(model: Words, tokens: Tensor) -> None:
    """A language model's step: logits and loss are made by functions."""
    hidden = model(tokens)
    logits = hidden @ model.embedding.weight.T
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()


def line_of(text: str) -> str:
    """The place of the line of `train` that has a text, as traces name it."""
    lines, first = inspect.getsourcelines(train)
    at = next(number for number, line in enumerate(lines) if text in line)
    return f"test_tracer_lines.py:{first + at} in train"


@pytest.fixture(scope="module")
def trace() -> RecordedTrace:
    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(0, WORDS, (8, 32))
    train(model, tokens)
    window = TraceWindow(model)
    window.start()
    train(model, tokens)
    found = window.stop()
    assert window.leave()
    return found


def outside(trace: RecordedTrace, phase: str) -> dict[str, int]:
    return {
        share.line: share.size
        for share in trace.result.shares
        if share.path == "(outside modules)" and share.phase == phase
    }


def stacks_of(trace: RecordedTrace, profile: int) -> set[tuple[str, ...]]:
    """The stacks of one profile of the trace's flame graph."""
    graph = flame_graph(trace)
    names = [frame["name"] for frame in graph["shared"]["frames"]]
    samples = graph["profiles"][profile]["samples"]
    return {tuple(names[number] for number in sample) for sample in samples}


LOGITS = 4 * 8 * 32 * WORDS


def test_the_peak_is_named_by_line(trace: RecordedTrace) -> None:
    forward, backward = outside(trace, "forward"), outside(trace, "backward")
    assert forward[line_of("@ model")] == LOGITS
    entropy = f"{line_of('cross_entropy')}: cross_entropy"
    assert LOGITS <= forward[entropy] < 1.01 * LOGITS
    # The gradients that its derivative makes, although loss.backward() called for them.
    assert backward[entropy] >= LOGITS
    assert sum(share.size for share in trace.result.shares) == trace.result.peak


def test_lines_come_with_what_they_allocated(trace: RecordedTrace) -> None:
    lines = trace.result.lines
    assert lines[0].line == f"{line_of('cross_entropy')}: cross_entropy"
    assert [one.at_peak for one in lines] == sorted((one.at_peak for one in lines), reverse=True)
    assert all(one.allocated >= one.at_peak for one in lines)
    whole = sum(trace.result.unattributed.values())
    assert 0.99 * whole <= sum(one.allocated for one in lines) <= 1.01 * whole


def test_modules_keep_their_names(trace: RecordedTrace) -> None:
    assert all(not share.line for share in trace.result.shares if share.path != "(outside modules)")
    assert {"mix", "embedding", "Words"} <= {layer.path for layer in trace.result.layers}


def test_flame_graphs_have_lines_below_outside_modules(trace: RecordedTrace) -> None:
    assert ("(outside modules)", line_of("@ model"), "[activations]") in stacks_of(trace, 0)
    assert ("forward", "(outside modules)", line_of("@ model")) in stacks_of(trace, 1)


def test_the_event_names_the_largest_and_layers_stay_as_they_are(trace: RecordedTrace) -> None:
    event = trace_event(trace.result, 3)
    assert event.lines[0].line == trace.result.lines[0].line
    assert 0 < len(event.lines) <= TOP_LINES
    assert "(outside modules)" in [layer.path for layer in event.layers]
    assert not any(".py:" in layer.path for layer in event.layers)


def test_the_summary_says_them(trace: RecordedTrace) -> None:
    number = line_of("cross_entropy").partition(":")[2].partition(" ")[0]
    assert f":{number} in train: cross_entropy" in summary_text(trace.result)


def test_a_scope_has_no_lines_and_what_made_no_graph_has() -> None:
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        with tracer.scope("augmentation"):
            inside = torch.zeros(100)
        beside = torch.ones(200)
    sizes = {share.line or share.path: share.size for share in tracer.result.shares}
    assert sizes["(augmentation)"] == inside.nbytes
    (line,) = (line for line in sizes if line.startswith("test_tracer_lines.py:"))
    assert sizes[line] == beside.nbytes
    assert "/" not in line


def test_what_no_line_made_is_named_by_who_calls_backward() -> None:
    model = nn.Linear(8, 8)
    loss = model(torch.zeros(4, 8)).exp().sum()
    tracer = MemoryTracer()
    with tracer.trace(model):
        loss.backward()
    lines = [
        share.line for share in tracer.result.shares if share.phase == "backward" and share.line
    ]
    assert lines
    assert all(line.endswith(": backward") for line in lines)


def test_traces_of_an_older_memlog_are_read(trace: RecordedTrace) -> None:
    older: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(trace))
    del older["lines"]
    del older["result"]["lines"]
    for share in older["result"]["shares"]:
        del share["line"]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=RecordedTrace)
    assert read.lines == read.result.lines == ()
    assert read.result.peak == trace.result.peak
    assert Share("a", "forward", "inputs", 1).holder == "a"


def test_a_packages_own_lines_are_shown_as_the_programs(tmp_path: Path) -> None:
    """The program's lines are shown, because its author can change them but not the package."""
    package = tmp_path / "site-packages" / "losses.py"
    package.parent.mkdir()
    package.write_text("def squares(x):\n    return (x * x).sum()\n")
    found: dict[str, Any] = {}
    exec(compile(package.read_text(), package, "exec"), found)  # noqa: S102 - ours
    weight = torch.ones(256, 256, requires_grad=True)
    with (tracer := MemoryTracer(device="cpu")).trace():
        found["squares"](weight)
    here = inspect.currentframe()
    assert here is not None
    line = here.f_lineno - 3
    assert f"test_tracer_lines.py:{line} in {here.f_code.co_name[:39]}" in str(tracer.result.lines)
    assert "losses.py" not in str(tracer.result.lines)
