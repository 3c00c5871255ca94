"""Twelve kinds of models, and the ways in which ranks share their training."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.estimates.models import (
    Case,
    Recurrent,
    UNet,
    classes,
    repeated_blocks,
    squares,
    text,
)

_WORDS: Final = 2000


class ConvNet(nn.Module):
    """Convolutions with batch normalisation, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
            )
            for a, b in itertools.pairwise(widths)
        )  # fmt: skip
        self.last = nn.Linear(widths[-1], 10)

    def forward(self, pictures: Tensor) -> Tensor:
        for part in self.parts:
            pictures = part(pictures)
        out: Tensor = self.last(pictures.mean((2, 3)))
        return out


class Recommender(nn.Module):
    """Tables that have most of the parameters, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10_001, 32) for _ in range(6))
        self.top = nn.Sequential(nn.Linear(6 * 32, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, rows: Tensor) -> Tensor:
        found = [table(row) for table, row in zip(self.tables, rows.unbind(1), strict=True)]
        out: Tensor = self.top(torch.cat(found, 1))
        return out


class Experts(nn.Module):
    """Mixture of experts, each of which chooses its words."""

    def __init__(self, width: int = 128, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, words: Tensor) -> Tensor:
        flat = words.flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        out = flat
        for share, expert in zip(shares.unbind(-1), self.experts, strict=True):
            chosen, rows = share.topk(len(flat) // len(self.experts))
            out = out.index_add(0, rows, chosen.unsqueeze(-1) * expert(flat[rows]))
        return out.view_as(words)


class TiedWords(nn.Module):
    """A language model whose embedding is also its last layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(8 * _WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 8 * _WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def next_words(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def labelled(model: nn.Module, pictures: Tensor) -> Tensor:
    labels = torch.arange(len(pictures)) % 2
    loss: Tensor = model(pixel_values=pictures, labels=labels).loss
    return loss


def twelve() -> Iterator[Case]:
    """Return twelve models of different kinds, each with a batch for the CPU and one for a CUDA device."""
    import transformers

    small: dict[str, Any] = {
        "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": _WORDS,
    }  # fmt: skip
    without_words = {key: value for key, value in small.items() if key != "vocab_size"}
    gpt2 = transformers.GPT2Config(n_embd=192, n_layer=3, n_head=4, vocab_size=_WORDS)
    llama = transformers.LlamaConfig(**small, num_key_value_heads=2)
    bert = transformers.BertConfig(**small)
    vit = transformers.ViTConfig(**without_words, image_size=64)

    def mlp() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(384, 384), nn.SiLU()) for _ in range(6)), nn.Linear(384, 10)
        )

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def mixture() -> nn.Module:
        return nn.Sequential(*(Experts() for _ in range(2)))

    def tokens(batch: int) -> Tensor:
        return torch.randint(_WORDS, (batch, 48))

    def pictures(batch: int) -> Tensor:
        return torch.randn(batch, 3, 64, 64)

    def rows(batch: int) -> Tensor:
        return torch.randint(10_000, (batch, 6))

    def vectors(*shape: int) -> Callable[[int], Tensor]:
        return lambda batch: torch.randn(batch, *shape)

    yield Case("MLP", mlp, vectors(384), squares, (128, 1024))
    yield Case("conv net with batch norm", ConvNet, pictures, classes, (16, 128))
    yield Case("transformer encoder", encoder, vectors(48, 128), squares, (16, 128))
    yield Case("GPT-2", lambda: transformers.GPT2LMHeadModel(gpt2), tokens, text, (8, 64))
    yield Case("Llama", lambda: transformers.LlamaForCausalLM(llama), tokens, text, (8, 64))
    yield Case("BERT", lambda: transformers.BertForMaskedLM(bert), tokens, text, (8, 64))
    yield Case(
        "ViT", lambda: transformers.ViTForImageClassification(vit), pictures, labelled, (8, 64)
    )
    yield Case("UNet", UNet, pictures, squares, (4, 64))
    yield Case("recommender, mostly tables", Recommender, rows, squares, (512, 4096))
    yield Case("LSTM", lambda: Recurrent(nn.LSTM), vectors(24, 32), squares, (128, 1024))
    yield Case("mixture of experts", mixture, vectors(48, 128), squares, (8, 128))
    yield Case("tied words", TiedWords, tokens, next_words, (4, 32))


def _replicated(model: nn.Module, _: int, __: str) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: nn.Module, ranks: int, kind: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh(kind, (ranks,))
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _kept(model: nn.Module, ranks: int, kind: str) -> nn.Module:
    return _sharded(model, ranks, kind, reshard_after_forward=False)


def _in_mixed_precision(model: nn.Module, ranks: int, kind: str) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _sharded(model, ranks, kind, mp_policy=policy)


WAYS: Final[dict[str, Callable[[nn.Module, int, str], nn.Module]]] = {
    "DDP": _replicated,
    "fully_shard": _sharded,
    "fully_shard, kept": _kept,
    "fully_shard, bfloat16": _in_mixed_precision,
}
"""Functions that distribute a model over a number of ranks on one kind of device.

*kept*: ``reshard_after_forward=False``.
"""

_WITH_BATCH_NORM: Final = ("conv net with batch norm", "UNet")


def trainings() -> Iterator[tuple[Case, str]]:
    """Return each case with the names of its ways in turn."""
    for case in twelve():
        for way in WAYS:
            # torch refuses batch normalisation with weights in bfloat16 and statistics in float32.
            if "bfloat16" not in way or case.name not in _WITH_BATCH_NORM:
                yield case, way


def step_of(case: Case) -> Callable[..., None]:
    """Return a function with one training step of a case, for `memlog.estimate` and for real ranks."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        case.loss(model, case.batch(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
