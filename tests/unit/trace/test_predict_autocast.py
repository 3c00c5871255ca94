"""Compares predicted savings of autocast with measured ones, in models of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.models import text
from support.predictions import assert_autocast_is_predicted
from support.training import CASES, Case, entropy, squares, traced
from torch import nn
from torch.nn import functional

from memlog.trace import encoding
from memlog.trace.predict import advise

pytestmark = pytest.mark.slow  # together they take longer than a quick look may


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class Explicit(nn.Module):
    """Attention whose softmax is written out."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.both, self.out, self.dropout = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.both(x).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2) / 8).softmax(dim=-1)
        out: torch.Tensor = self.out(functional.dropout(weights, self.dropout) @ value)
        return out


class Kernel(Explicit):
    """Attention that torch's own function computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.both(x).chunk(3, dim=-1)
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        out: torch.Tensor = self.out(found)
        return out


class Softplus(nn.Module):
    """Many operations between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.softplus(layer(x)).exp().log1p()
        return functional.log_softmax(x, -1)


class Twice(nn.Module):
    """One network on two inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x) - self.net(x.flip(-1))
        return out


class Pyramid(nn.Module):
    """Model that halves the resolution and restores it, with one skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.norm = nn.Conv2d(48, 8, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.down(x)).relu()
        second = self.inner(functional.max_pool2d(first, 2)).relu()
        wide = functional.interpolate(second, scale_factor=2, mode="bilinear")
        out: torch.Tensor = self.up(torch.cat([wide, first], dim=1))
        return out


def pooled() -> nn.Module:
    parts = (
        (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        for before, after in ((3, 32), (32, 64))
    )
    return nn.Sequential(
        *(one for part in parts for one in part), nn.Flatten(), nn.Linear(4096, 10)
    )


def transformer(dropout: float, *, norm_first: bool = False) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout, batch_first=True, norm_first=norm_first
        )
        layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(200, 64), layers, nn.Linear(64, 200))

    return model


def attention(kind: Any, dropout: float) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        blocks = (Residual(nn.LayerNorm(64), kind(64, dropout)) for _ in range(3))
        return nn.Sequential(nn.Embedding(200, 64), *blocks, nn.Linear(64, 200))

    return model


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


def words(batch: int) -> torch.Tensor:
    return text(batch, 96) % 200


MODELS = {
    "max pooling": Case(pooled, images, squares, 16),
    "one network twice": Case(lambda: Twice(pooled()), images, squares, 16),
    "pyramid": Case(Pyramid, images, squares, 16),
    "encoder with dropout": Case(transformer(0.1), words, entropy, 8),
    "encoder, norm first": Case(transformer(0.1, norm_first=True), words, entropy, 8),
    "explicit attention with dropout": Case(attention(Explicit, 0.1), words, entropy, 8),
    "torch's attention": Case(attention(Kernel, 0.0), words, entropy, 8),
    "torch's attention with dropout": Case(attention(Kernel, 0.1), words, entropy, 8),
    "softplus": Case(Softplus, lambda batch: torch.randn(batch, 256), squares, 1024),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.seed(254)
def test_models_of_many_kinds(name: str) -> None:
    assert_autocast_is_predicted(MODELS[name])


def test_a_trace_without_types_gives_no_figure() -> None:
    """Traces of a GPU, whose history has no types, and of an older memlog."""
    trace = traced(CASES["mlp"])
    events = b"".join(
        encoding.pack(*event)
        for event in (
            one._replace(size=0, layer=0, phase=0, thread=0) if one.kind == encoding.FREE else one
            for one in encoding.decode(trace.events)
        )
        if event.kind != encoding.USES
    )
    advice = advise(replace(trace, events=events))
    assert "precision" not in {one.kind for one in advice.hints}
    assert any("autocast would save can't be predicted: this trace" in n for n in advice.notes)


def test_whole_numbers_are_not_halved() -> None:
    """Max-pooling keeps indices of eight bytes each."""
    case = MODELS["max pooling"]
    events = encoding.decode(traced(case).events)
    other = {event.key for event in events if event.kind == encoding.FREE and event.phase == 3}
    sizes = {
        event.size
        for event in encoding.decode(traced(case).events)
        if event.kind == encoding.ALLOC and event.key in other
    }
    assert 16 * 32 * 16 * 16 * 8 in sizes
