"""Models of the benchmark, with random weights: in plain PyTorch, of torchvision, and of transformers."""

# PyTorch leaves some of these without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, Any], Tensor]


class Case(NamedTuple):
    """A model, with the functions that make a batch and compute the loss."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Loss
    batches: tuple[int, int] = (4, 16)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.float().square().mean()


def with_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return squares(model, batch)


def classes(model: nn.Module, batch: Tensor) -> Tensor:
    out: Any = model(batch)
    return functional.cross_entropy(out, torch.arange(len(out)) % out.shape[1])


def text(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def last_state(model: nn.Module, tokens: Tensor) -> Tensor:
    states: Tensor = model(tokens).last_hidden_state
    return states.square().mean()


def first_output(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)[0]
    return out.square().mean()


class Recurrent(nn.Module):
    """Two recurrent layers and a linear one over the last step."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(32, 64, num_layers=2, batch_first=True)
        self.last = nn.Linear(64, 8)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(batch)[0][:, -1])
        return out


class UNet(nn.Module):
    """A small UNet with one skip connection at each of three levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.first = _double(3, width)
        self.down = nn.ModuleList([_double(a, b) for a, b in itertools.pairwise(sizes)])
        self.up = nn.ModuleList(
            [_double(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True)]
        )
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, batch: Tensor) -> Tensor:
        levels = [self.first(batch)]
        for down in self.down:
            levels.append(down(functional.max_pool2d(levels[-1], 2)))
        out = levels.pop()
        for up in self.up:
            out = up(torch.cat([functional.interpolate(out, scale_factor=2), levels.pop()], 1))
        last: Tensor = self.last(out)
        return last


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class Checkpointed(nn.Module):
    """Blocks that run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128))
            for _ in range(6)
        )

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = batch + checkpoint(block, batch, use_reentrant=False)
        return batch


class Attention(nn.Module):
    """Attention in single operations, so that the matrix of scores is kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(64, 192)

    def forward(self, batch: Tensor) -> Tensor:
        query, key, value = self.queries(batch).chunk(3, -1)
        scores = torch.softmax(query @ key.transpose(1, 2) / 8, -1)
        out: Tensor = functional.dropout(scores, 0.1, self.training) @ value
        return out


class Graph(nn.Module):
    """Message passing over a fixed list of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(64, 64)
        self.update = nn.GRUCell(64, 64)

    def forward(self, nodes: Tensor) -> Tensor:
        count = nodes.shape[0]
        source = torch.arange(count).repeat(8)
        target = torch.arange(8 * count) % count
        for _ in range(3):
            sent = self.message(nodes)[source].to(nodes.dtype)
            nodes = self.update(torch.zeros_like(nodes).index_add(0, target, sent), nodes)
        return nodes


def plain() -> Iterator[Case]:
    def vectors(width: int) -> Callable[[int], Tensor]:
        return lambda batch: torch.randn(batch, width)

    def sequences(length: int, width: int) -> Callable[[int], Tensor]:
        return lambda batch: torch.randn(batch, length, width)

    def pictures(side: int) -> Callable[[int], Tensor]:
        return lambda batch: torch.randn(batch, 3, side, side)

    def mlp() -> nn.Module:
        parts = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.SiLU())]
        return nn.Sequential(*parts)

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def autoencoder() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
        )  # fmt: skip

    def waves() -> nn.Module:
        parts = [
            part
            for at in range(4)
            for part in (
                nn.Conv1d(16 if at else 1, 16, 5, padding=2**at * 2, dilation=2**at),
                nn.GroupNorm(4, 16),
                nn.PReLU(),
            )
        ]
        return nn.Sequential(*parts)

    yield Case("MLP", mlp, vectors(256), squares, (64, 1024))
    yield Case("MLP, bfloat16 autocast", mlp, vectors(256), with_autocast, (64, 1024))
    yield Case("LSTM", lambda: Recurrent(nn.LSTM), sequences(24, 32), squares)
    yield Case("GRU", lambda: Recurrent(nn.GRU), sequences(24, 32), squares)
    yield Case("UNet", UNet, pictures(48), squares)
    yield Case("autoencoder", autoencoder, pictures(64), squares)
    yield Case("checkpointed blocks", Checkpointed, sequences(32, 128), squares)
    yield Case("attention, written out", Attention, sequences(96, 64), squares)
    yield Case("transformer encoder", encoder, sequences(48, 64), squares)
    yield Case("graph network", Graph, vectors(64), squares, (64, 512))
    yield Case("dilated convolutions", waves, lambda batch: torch.randn(batch, 1, 512), squares)


def of_torchvision() -> Iterator[Case]:
    models = _torchvision()
    if models is None:
        return
    names = (
        "resnet18 mobilenet_v3_small efficientnet_b0 convnext_tiny "
        "squeezenet1_1 shufflenet_v2_x1_0 regnet_y_400mf swin_t"
    )
    for name in names.split():

        def make(name: str = name) -> nn.Module:
            made: nn.Module = models.get_model(name, weights=None, num_classes=10)
            return made

        def pictures(batch: int) -> Tensor:
            return torch.randn(batch, 3, 64, 64)

        yield Case(f"torchvision {name}", make, pictures, classes, (2, 8))


def _torchvision() -> Any:
    """Return the module of torchvision's models, or ``None`` if torchvision is not installed.

    With a torch without CUDA, torchvision's wheel for CUDA can't load its own operations. The models need
    none of these, but the import fails if their names are not defined.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        _kept.append(library)
    return importlib.import_module("torchvision.models")


_kept: list[Any] = []


def of_transformers() -> Iterator[Case]:
    import transformers

    small: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 500,
    }  # fmt: skip

    def tokens(batch: int) -> Tensor:
        return torch.randint(500, (batch, 48))

    def pictures(batch: int) -> Tensor:
        return torch.randn(batch, 3, 64, 64)

    def case(kind: str, loss: Loss, made: Callable[[int], Tensor] = tokens, **changed: Any) -> Case:
        family = kind.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("Model")
        settings = getattr(transformers, f"{family.removesuffix('ForMasked')}Config")(**changed)
        return Case(
            f"transformers {kind}", lambda: getattr(transformers, kind)(settings), made, loss
        )

    yield case("GPT2LMHeadModel", text, n_embd=64, n_layer=3, n_head=4, vocab_size=500)
    yield case("LlamaForCausalLM", text, **small)
    yield case("Qwen2ForCausalLM", text, **small, num_key_value_heads=2)
    yield case("GPTNeoXForCausalLM", text, **small)
    yield case("BertModel", last_state, **small)
    yield case("DistilBertModel", last_state, dim=64, n_layers=3, n_heads=4, hidden_dim=128)
    yield case("ViTModel", last_state, pictures, **_without(small, "vocab_size"), image_size=64)
    yield case(
        "ConvNextModel", last_state, pictures, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1]
    )


def on_device_only() -> Iterator[Case]:
    """Return larger models, as people train them on a GPU."""
    import transformers

    def tokens(batch: int) -> Tensor:
        return torch.randint(500, (batch, 512))

    def pictures(batch: int) -> Tensor:
        return torch.randn(batch, 3, 224, 224)

    models = _torchvision()
    sizes: dict[str, Any] = {"num_hidden_layers": 8, "vocab_size": 8000}
    llama = transformers.LlamaConfig(**sizes, hidden_size=768, intermediate_size=2048)
    gpt2 = transformers.GPT2Config(n_layer=6)
    yield Case(
        "Llama, 8 layers", lambda: transformers.LlamaForCausalLM(llama), tokens, text, (1, 1)
    )
    yield Case("GPT-2, 6 layers", lambda: transformers.GPT2LMHeadModel(gpt2), tokens, text, (1, 1))
    if models is not None:
        yield Case("ResNet-50", lambda: models.resnet50(num_classes=100), pictures, classes, (1, 1))


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def cases() -> Iterator[Case]:
    """Return all cases."""
    yield from plain()
    yield from of_torchvision()
    yield from of_transformers()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters of the longest list or sequence in a model."""
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    largest = max(lists, key=len, default=model)
    return [each for each in largest.children() if any(True for _ in each.parameters())]
