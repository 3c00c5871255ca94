"""Training steps of many kinds, whose traced peaks are compared with those of untraced ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
Case = Callable[[], tuple[nn.Module, Step]]


class Recurrent(nn.Module):
    """A recurrent network over tokens. If packed, its sequences have several lengths."""

    def __init__(self, kind: Any, *, packed: bool, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.rnn = kind(32, 64, batch_first=True, **options)
        self.head = nn.Linear(64 * (2 if options.get("bidirectional") else 1), 10)
        self.packed = packed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.packed:
            lengths = torch.linspace(tokens.shape[1], 10, len(tokens)).long()
            x = pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = self.rnn(x)
        if self.packed:
            out, _ = pad_packed_sequence(out, batch_first=True)
        logits: Tensor = self.head(out)
        return logits


class Attention(nn.Module):
    """Scaled dot-product attention, computed by one of torch's implementations."""

    def __init__(self, *, mask: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mask = torch.ones(60, 60, dtype=torch.bool).tril() if mask else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return functional.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)


class Applied(nn.Module):
    """A linear layer and a function, which is applied to the layer's result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def trained(
    model: nn.Module, batch: Tensor, optimizer: Callable[..., Any] = torch.optim.Adam
) -> tuple[nn.Module, Step]:
    steps = optimizer(model.parameters())

    def step() -> None:
        out = model(batch)
        out = torch.view_as_real(out) if out.is_complex() else out
        out.float().square().mean().backward()
        steps.step()
        steps.zero_grad()

    return model, step


def recurrent(kind: Any, *, packed: bool, **options: Any) -> Case:
    return lambda: trained(
        Recurrent(kind, packed=packed, **options), torch.randint(0, 500, (16, 30))
    )


IMAGES = (4, 3, 24, 24)
SEQUENCES = (4, 60, 32)


def layers(shape: tuple[int, ...], *modules: nn.Module) -> tuple[nn.Module, Step]:
    return trained(nn.Sequential(*modules), torch.randn(shape))


def applied(function: Callable[[Tensor], Tensor], *shape: int) -> Case:
    return lambda: trained(Applied(function), torch.randn(shape or (128, 64)))


def stepped(optimizer: Callable[..., Any]) -> Case:
    return lambda: trained(
        nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)),
        torch.randn(8, 128),
        optimizer,
    )


def encoder_that_evaluates() -> tuple[nn.Module, Step]:
    """A transformer encoder in evaluation, which takes torch's fast path."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    batch = torch.randn(4, 60, 32)

    def step() -> None:
        with torch.no_grad():
            model(batch)

    return model, step


def gradient_penalty() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.Tanh())
    batch = torch.randn(128, 64, requires_grad=True)

    def step() -> None:
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward(inputs=list(model.parameters()))
        model.zero_grad()

    return model, step


def hooks_that_add() -> tuple[nn.Module, Step]:
    """A module whose hook makes a tensor in each step, whether the step is traced or not."""
    model = nn.Linear(256, 256)
    batch = torch.randn(64, 256)

    def step() -> None:
        hidden = model(batch)
        hidden.register_hook(lambda gradient: gradient + 1)
        (hidden.sin() + hidden.cos() + hidden.exp()).sum().backward()
        model.zero_grad()

    return model, step


def gradients_kept() -> tuple[nn.Module, Step]:
    model = nn.Linear(256, 256)
    batch = torch.randn(64, 256)

    def step() -> None:
        hidden = model(batch)
        hidden.retain_grad()
        loss = (hidden.sin() + hidden.cos() + model(batch).tanh()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        model.zero_grad()

    return model, step


def functions() -> tuple[nn.Module, Step]:
    """``torch.func``: one gradient for each example."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    batch = torch.randn(16, 32)
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, parameters, (one[None],))
        return out.square().mean()

    return model, lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)


def nested() -> tuple[nn.Module, Step]:
    model = nn.Linear(64, 64)
    parts = [torch.randn(length, 64) for length in (30, 50, 70)]

    def step() -> None:
        together = torch.nested.nested_tensor(parts, layout=torch.jagged)
        model(together).values().square().mean().backward()
        model.zero_grad()

    return model, step


def autocast(make: Callable[[], tuple[nn.Module, Tensor]]) -> Case:
    def case() -> tuple[nn.Module, Step]:
        model, batch = make()

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            loss.backward()
            model.zero_grad()

        return model, step

    return case


def ctc(x: Tensor) -> Tensor:
    words = torch.arange(80).reshape(8, 10) % 63 + 1
    return functional.ctc_loss(x.log_softmax(2), words, torch.full((8,), 50), torch.full((8,), 10))


ROWS = torch.arange(300) * 7 % 128
PLACES = torch.arange(128 * 64).reshape(128, 64) * 5 % 64

EXACT: dict[str, Case] = {
    "packed GRU": recurrent(nn.GRU, packed=True),
    "packed GRU, both ways": recurrent(nn.GRU, packed=True, bidirectional=True),
    "GRU": recurrent(nn.GRU, packed=False),
    "packed LSTM, two layers": recurrent(nn.LSTM, packed=True, num_layers=2, dropout=0.1),
    "LSTM": recurrent(nn.LSTM, packed=False),
    "packed RNN": recurrent(nn.RNN, packed=True),
    "RNN": recurrent(nn.RNN, packed=False),
    "packed GRU in bfloat16": autocast(
        lambda: (Recurrent(nn.GRU, packed=True), torch.randint(0, 500, (16, 30)))
    ),
    "attention": lambda: layers(SEQUENCES, Attention()),
    "attention, masked": lambda: layers(SEQUENCES, Attention(mask=True)),
    "attention, masked, dropout": lambda: layers(SEQUENCES, Attention(mask=True, dropout=0.1)),
    "transformer": lambda: layers(
        SEQUENCES, nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    ),
    "transformer, evaluated": encoder_that_evaluates,
    "convolution 1d": lambda: layers(
        (4, 3, 200), nn.Conv1d(3, 16, 5), nn.BatchNorm1d(16), nn.GELU()
    ),
    "convolution 2d": lambda: layers(
        IMAGES, nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3)
    ),
    "convolution 3d": lambda: layers((2, 2, 12, 12, 12), nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4)),
    "transposed convolution": lambda: layers(
        IMAGES, nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.LeakyReLU()
    ),
    "grouped convolution": lambda: layers(
        (4, 8, 24, 24), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 3, groups=4)
    ),
    "bags of embeddings": lambda: trained(
        nn.Sequential(nn.EmbeddingBag(1000, 32), nn.Linear(32, 8)), torch.randint(0, 1000, (64, 20))
    ),
    "one layer, several ways": applied(lambda x: x.sin() + x.cos() + x.tanh() + x * x),
    "distances": applied(lambda x: torch.cdist(x, x)),
    "einsum": applied(lambda x: torch.einsum("bij,bkj->bik", x, x), 4, 64, 64),
    "ctc": applied(ctc, 50, 8, 64),
    "binary cross-entropy": applied(
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones(128, 64))
    ),
    "interpolation": applied(
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), 2, 3, 16, 64
    ),
    "singular values": applied(lambda x: torch.linalg.svd(x, full_matrices=False)[1], 64, 64),
    "cholesky": applied(lambda x: torch.linalg.cholesky(x @ x.mT + 64 * torch.eye(64)), 2, 64, 64),
    "solve": applied(lambda x: torch.linalg.solve(x + 8 * torch.eye(64), x), 2, 64, 64),
    "sort": applied(lambda x: x.sort(dim=1)[0]),
    "topk": applied(lambda x: x.topk(8, dim=1)[0]),
    "maxima": applied(lambda x: x.max(dim=1)[0]),
    "gather": applied(lambda x: x.gather(1, PLACES)),
    "scatter": applied(lambda x: torch.zeros(128, 64).scatter_add(1, PLACES, x)),
    "scatter, the largest": applied(
        lambda x: torch.zeros(128, 64).scatter_reduce(1, PLACES, x, "amax")
    ),
    "rows by index": applied(lambda x: x[ROWS]),
    "mask": applied(lambda x: x[x > 0]),
    "assignment by index": applied(
        lambda x: torch.zeros(128, 64).index_put((ROWS[:128],), x, accumulate=True)
    ),
    "a number read back": applied(lambda x: x * len(set(x.detach().round().flatten().tolist()))),
    "diagonal and trace": applied(lambda x: x.diagonal() * 2 + x[:64].trace()),
    "slices, one by one": applied(lambda x: torch.stack([row.sin() for row in x])),
    "two types": applied(lambda x: x * (x > 0)),
    "atan2": applied(lambda x: torch.atan2(x, x + 1)),
    "checkpointed": applied(
        lambda x: checkpoint(lambda y: y.sin().cos().exp(), x, use_reentrant=False)
    ),
    "gradient penalty": gradient_penalty,
    "hooks that add": hooks_that_add,
    "gradients that are kept": gradients_kept,
    "functions of torch.func": functions,
    "nested": nested,
    "bfloat16": autocast(
        lambda: (
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
            torch.randn(64, 64),
        )
    ),
    "SGD, one by one": stepped(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False)),
    "AdamW, all at once": stepped(lambda p: torch.optim.AdamW(p, foreach=True)),
    "Adam, fused": stepped(lambda p: torch.optim.Adam(p, fused=True)),
    "Adafactor": stepped(torch.optim.Adafactor),
}
"""Steps by name whose traces are exact."""

INEXACT: dict[str, tuple[Case, str]] = {
    "Fourier transform": (applied(torch.fft.rfft), "lower bound"),
    "complex": (applied(lambda x: torch.complex(x, x) * torch.complex(x, -x)), "lower bound"),
    "sparse gradients": (
        lambda: trained(
            nn.Sequential(nn.EmbeddingBag(1000, 32, sparse=True)),
            torch.randint(0, 1000, (64, 20)),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
        ),
        "approximate",
    ),
    "products": (applied(lambda x: x.prod(1)), "lower bound"),
    "running products": (applied(lambda x: x.cumprod(0)), "approximate"),
    "the largest of all": (applied(lambda x: x.max() * x), "approximate"),
    "weighted binary cross-entropy": (
        applied(
            lambda x: functional.binary_cross_entropy_with_logits(
                x, torch.ones(128, 64), pos_weight=torch.ones(64)
            )
        ),
        "approximate",
    ),
}
"""Steps by name whose traces are not exact, with the reason that the trace gives."""
