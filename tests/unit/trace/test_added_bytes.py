"""Bytes that a layer adds while it runs to those that were live before."""

from __future__ import annotations

import torch
from support.models import GPT, text
from torch import Tensor, nn

from memlog import MemoryTracer
from memlog.trace.accounting import Accountant
from memlog.trace.encoding import (
    ALLOC,
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    FREE,
    OUTSIDE,
    PHASE_CHANGE,
    UNDECIDED,
    pack,
)

MIB = 1024**2
MODEL, BLOCK, HEAD = 1, 2, 3
AROUND = {OUTSIDE: (), MODEL: (MODEL,), BLOCK: (MODEL, BLOCK), HEAD: (MODEL, HEAD)}


def folded(*events: tuple[int, int, int, int, int]) -> Accountant:
    """Accounting of events: kind, serial, bytes, layer, phase."""
    accountant = Accountant(layers_around=AROUND.__getitem__)
    accountant.fold(
        b"".join(
            pack(key, size, time, layer, kind, phase, UNDECIDED, 1)
            for time, (kind, key, size, layer, phase) in enumerate(events)
        )
    )
    accountant.finish()
    return accountant


def test_a_forward_adds_its_highest_level_above_its_beginning() -> None:
    books = folded(
        (ALLOC, 1, 1000, OUTSIDE, FORWARD),
        (ENTER, 0, 0, MODEL, FORWARD),
        (ENTER, 0, 0, BLOCK, FORWARD),
        (ALLOC, 2, 300, BLOCK, FORWARD),
        (ALLOC, 3, 200, BLOCK, FORWARD),
        (FREE, 2, 0, BLOCK, FORWARD),
        (EXIT, 0, 0, BLOCK, FORWARD),
        (ENTER, 0, 0, HEAD, FORWARD),
        (ALLOC, 4, 400, HEAD, FORWARD),
        (EXIT, 0, 0, HEAD, FORWARD),
        (EXIT, 0, 0, MODEL, FORWARD),
    )
    assert books.added == {BLOCK: 500, HEAD: 400, MODEL: 600}


def test_the_largest_of_several_calls_counts() -> None:
    call = [(ENTER, 0, 0, BLOCK, FORWARD), (EXIT, 0, 0, BLOCK, FORWARD)]
    books = folded(
        call[0],
        (ALLOC, 1, 300, BLOCK, FORWARD),
        call[1],
        call[0],
        (ALLOC, 2, 100, BLOCK, FORWARD),
        call[1],
    )
    assert books.added == {BLOCK: 300}


def test_a_part_of_the_backward_pass_ends_where_another_layers_begins() -> None:
    books = folded(
        (PHASE_CHANGE, 0, 0, HEAD, BACKWARD),
        (ALLOC, 1, 100, HEAD, BACKWARD),
        (PHASE_CHANGE, 0, 0, BLOCK, BACKWARD),
        (ALLOC, 2, 700, BLOCK, BACKWARD),
        (FREE, 1, 0, BLOCK, BACKWARD),
        (PHASE_CHANGE, 0, 0, OUTSIDE, BACKWARD),
        (ALLOC, 3, 5000, OUTSIDE, BACKWARD),
        (PHASE_CHANGE, 0, 0, BLOCK, BACKWARD),
        (ALLOC, 4, 50, BLOCK, BACKWARD),
        (PHASE_CHANGE, 0, 0, OUTSIDE, FORWARD),
        (ALLOC, 5, 9000, OUTSIDE, FORWARD),
    )
    assert books.added == {HEAD: 100, BLOCK: 700, MODEL: 800}


class WithBallast(nn.Module):
    """A layer, and a parameter that only takes room."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.ballast = nn.Parameter(torch.ones(MIB))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_what_was_there_before_is_not_added() -> None:
    model, tracer = WithBallast(), MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(4, 8)).sum().backward()
    figures = tracer.get_layer_figures("layer")
    assert figures.peak is not None
    assert figures.peak > 4 * MIB
    assert figures.added is not None
    assert 8 * 8 * 4 + 8 * 4 < figures.added < 1024  # its gradients, and work memory


def test_a_whole_forward_adds_the_steps_peak() -> None:
    model, batch, tracer = GPT(), text(), MemoryTracer()
    with tracer.trace(model):
        model(batch)
    result = tracer.result
    added = {layer.path: layer.added or 0 for layer in result.layers}
    assert added["GPT"] == (result.peak or 0) - (result.before or 0)
    assert added["GPT"] > added["blocks.0"] > added["blocks.0.mlp"] > added["blocks.0.mlp.0"] > 0
    assert added["(outside modules)"] == 0  # unknown
