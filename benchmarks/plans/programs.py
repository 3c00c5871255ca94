"""Twenty kinds of training, small enough for a CPU."""

# PyTorch and transformers leave some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


class Program(NamedTuple):
    """Training of a model."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """Makes a batch of some samples: a tensor, or `Together`."""
    loss: Loss
    size: int
    """Number of samples in a batch."""
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam


class Together(tuple[Tensor, ...]):
    """Tensors of one batch, which are divided together."""

    __slots__ = ()

    def chunk(self, parts: int) -> list[Together]:
        return [Together(each) for each in zip(*(one.chunk(parts) for one in self), strict=True)]


class Tagger(nn.Module):
    """A recurrent network over words, with an output for each word."""

    def __init__(self, kind: Callable[..., nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        self.cells = kind(64, width, batch_first=True, **options)
        self.tags = nn.Linear(width * (1 + self.cells.bidirectional), 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tags(self.cells(self.words(x))[0])
        return out


class Forecast(nn.Module):
    """The next values of series of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(12, 160, batch_first=True)
        self.head = nn.Sequential(nn.Linear(160, 80), nn.ReLU(), nn.Linear(80, 12))

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.linspace(x.shape[1] // 2, x.shape[1], len(x)).long()
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out: Tensor = self.head(self.cells(packed)[1][0][-1])
        return out


class Translation(nn.Module):
    """Two recurrent networks with attention between them."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(300, width)
        self.source = nn.GRU(width, width, batch_first=True)
        self.target = nn.GRU(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(2 * width, 300)

    def forward(self, x: Tensor) -> Tensor:
        source, last = self.source(self.words(x))
        target, _ = self.target(self.words(x.flip(1)), last)
        seen, _ = self.attention(target, source, source, need_weights=False)
        out: Tensor = self.head(torch.cat([target, seen], -1))
        return out


def convolutions() -> nn.Module:
    """Convolutions with batch norms and dropout, as in VGG."""
    widths = (3, 24, 48, 64)
    blocks = (
        nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.MaxPool2d(2),
        )
        for before, after in itertools.pairwise(widths)
    )
    return nn.Sequential(
        *blocks, nn.Flatten(), nn.Linear(64 * 36, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10)
    )


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, *, by_channel: bool = False) -> None:
        super().__init__()
        groups = inner if by_channel else 1
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish() if by_channel else nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish() if by_channel else nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def bottlenecks(*, by_channel: bool) -> nn.Module:
    width, inner = (24, 96) if by_channel else (64, 24)
    blocks = (Bottleneck(width, inner, by_channel=by_channel) for _ in range(4))
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), *blocks, *ends)


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.GroupNorm(8, 64), nn.SiLU()),
        nn.Sequential(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()),
    )


class Dilated(nn.Module):
    """Residual convolutions over time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 3, padding=2**at, dilation=2**at),
                nn.GroupNorm(8, width),
                nn.GELU(),
                nn.Dropout(0.1),
            )
            for at in range(5)
        )
        self.last = nn.Conv1d(width, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


class Levels(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(self._level, (2, 16, 32), (16, 32, 64)))
        self.up = nn.ModuleList(map(self._level, (96, 48), (32, 16)))
        self.last = nn.Conv2d(16, 2, 1)

    @staticmethod
    def _level(before: int, after: int) -> nn.Module:
        convolutions = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(
            convolutions[0], nn.BatchNorm2d(after), nn.ReLU(), convolutions[1], nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for level, skipped in zip(self.up, kept[-2::-1], strict=True):
            x = level(torch.cat([functional.interpolate(x, scale_factor=2.0), skipped], 1))
        out: Tensor = self.last(x)
        return out


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.both, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(normed), *self.both(normed).chunk(2, -1))
        )
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return out


def attention(dropout: float) -> nn.Module:
    blocks = (AttentionBlock(72, 6, dropout) for _ in range(4))
    return nn.Sequential(nn.Linear(24, 72), *blocks, nn.Linear(72, 24))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(80, 5, 320, 0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(400, 80), layers, nn.Linear(80, 400))


class Mixer(nn.Module):
    """MLPs over the patches and over the channels, in turn."""

    def __init__(self, patches: int = 36, width: int = 64) -> None:
        super().__init__()
        self.over_patches = nn.ModuleList(self._mlp(patches, 72) for _ in range(4))
        self.over_channels = nn.ModuleList(self._mlp(width, 256) for _ in range(4))

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        for patches, channels in zip(self.over_patches, self.over_channels, strict=True):
            x = x + patches(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return x


class Clicks(nn.Module):
    """Large tables of embeddings under a small network, as for recommendations."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, 32) for _ in range(8))
        self.deep = nn.Sequential(
            nn.Linear(256, 512),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cat([table(x[:, at]) for at, table in enumerate(self.tables)], -1)
        out: Tensor = self.deep(found)[:, 0]
        return out


class Messages(nn.Module):
    """Messages along the edges of graphs, summed at the nodes."""

    def __init__(self, width: int = 32, nodes: int = 40, edges: int = 160) -> None:
        super().__init__()
        self.register_buffer("ends", torch.randint(nodes, (2, edges)))
        self.first = nn.Linear(8, width)
        self.message = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU()) for _ in range(3)
        )
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU()) for _ in range(3)
        )
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        ends: Any = self.ends
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([x[:, ends[0]], x[:, ends[1]]], -1))
            x = update(torch.cat([x, torch.zeros_like(x).index_add(1, ends[1], sent)], -1))
        out: Tensor = self.last(x).mean((1, 2))
        return out


class Variational(nn.Module):
    """Autoencoder of layers, with noise between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)
        )
        self.decode = nn.Sequential(
            nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 784)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        noisy = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decode(noisy), (mean.square() + spread.exp() - spread).mean()


class Adapted(nn.Module):
    """A frozen layer and a small trained one beside it, as LoRA has them."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.inward, self.outward = (
            nn.Linear(frozen.in_features, rank, bias=False),
            nn.Linear(rank, frozen.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.outward(self.inward(x))
        return out


def adapted() -> nn.Module:
    """Return the attention with its projections adapted, and all else frozen."""
    model = attention(0.0).requires_grad_(requires_grad=False)
    for module in model.children():
        if isinstance(module, AttentionBlock):
            module.query, module.both = Adapted(module.query), Adapted(module.both)  # type: ignore[assignment]
    return model


def of_transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return the maker of a model of the package transformers, with random weights."""

    def model() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(use_cache=False, **options)
        kinds = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
        made: nn.Module = getattr(transformers, f"{name}{kinds[name]}")(config)
        return made

    return model


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return functional.mse_loss(model(x), x)


def mean_squares(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def tags(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return functional.cross_entropy(found.flatten(0, 1), x.flatten() % found.shape[-1])


def classes(model: nn.Module, pair: Together) -> Tensor:
    return functional.cross_entropy(model(pair[0]), pair[1])


def clicks(model: nn.Module, pair: Together) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(pair[0]), pair[1])


def noise(model: nn.Module, x: Tensor) -> Tensor:
    found, spread = model(x)
    loss: Tensor = functional.mse_loss(found, x) + spread
    return loss


def triplets(model: nn.Module, x: Tensor) -> Tensor:
    return functional.triplet_margin_loss(model(x[:, 0]), model(x[:, 1]), model(x[:, 2]))


def own(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(input_ids=x, labels=x).loss
    return found


def words(length: int, count: int = 300) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(count, (batch, length))


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def labelled(*shape: int) -> Callable[[int], Together]:
    return lambda batch: Together((torch.randn(batch, *shape), torch.randint(10, (batch,))))


def clicked(batch: int) -> Together:
    return Together((torch.randint(2000, (batch, 8)), torch.rand(batch).round()))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


PROGRAMS = (
    Program("LSTM over words", lambda: Tagger(nn.LSTM, 192), words(40), tags, 32),
    Program(
        "LSTM in two directions, two layers, dropout",
        lambda: Tagger(nn.LSTM, 96, num_layers=2, bidirectional=True, dropout=0.2),
        words(24),
        tags,
        32,
        torch.optim.AdamW,
    ),
    Program(
        "LSTM of packed sequences",
        Forecast,
        numbers(32, 12),
        lambda model, x: (model(x) - x[:, -1]).square().mean(),
        32,
    ),
    Program(
        "GRU, two layers", lambda: Tagger(nn.GRU, 128, num_layers=2), words(32), tags, 32, momentum
    ),
    Program("GRUs with attention", Translation, words(28), tags, 32),
    Program("CNN with batch norms and dropout", convolutions, labelled(3, 48, 48), classes, 32),
    Program(
        "residual bottlenecks",
        lambda: bottlenecks(by_channel=False),
        labelled(3, 48, 48),
        classes,
        32,
        momentum,
    ),
    Program(
        "convolutions by channel",
        lambda: bottlenecks(by_channel=True),
        labelled(3, 48, 48),
        classes,
        16,
    ),
    Program("convolutional autoencoder", autoencoder, numbers(3, 64, 64), squares, 16),
    Program("dilated convolutions over time", Dilated, numbers(6, 256), squares, 32),
    Program("U-Net", Levels, numbers(2, 48, 48), squares, 16),
    Program("attention", lambda: attention(0.0), numbers(48, 24), squares, 32),
    Program("attention with dropout", lambda: attention(0.15), numbers(48, 24), squares, 32),
    Program(
        "adapters in frozen attention (LoRA)",
        adapted,
        numbers(48, 24),
        squares,
        32,
        torch.optim.AdamW,
    ),
    Program("transformer encoder, dropout", encoder, words(40, 400), tags, 16),
    Program("MLP-Mixer", Mixer, numbers(36, 64), squares, 32),
    Program("embeddings for recommendations", Clicks, clicked, clicks, 2048, torch.optim.Adagrad),
    Program("messages in graphs", Messages, numbers(40, 8), mean_squares, 32),
    Program("variational autoencoder", Variational, numbers(784), noise, 1024),
    Program(
        "triplets",
        lambda: nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 64)
        ),
        numbers(3, 128),
        triplets,
        1024,
        torch.optim.RMSprop,
    ),
    Program(
        "GPT-2",
        of_transformers("GPT2", vocab_size=300, n_positions=64, n_embd=96, n_layer=4, n_head=4),
        words(48),
        own,
        16,
    ),
    Program(
        "BERT",
        of_transformers(
            "Bert",
            vocab_size=300,
            hidden_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=384,
        ),
        words(48),
        own,
        16,
        torch.optim.AdamW,
    ),
    Program(
        "T5",
        of_transformers(
            "T5",
            vocab_size=300,
            d_model=96,
            d_kv=24,
            d_ff=256,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        words(32),
        own,
        16,
    ),
)
