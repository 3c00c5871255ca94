"""Training of a small GPT for about a minute, while memlog records its memory.

    python examples/train_gpt.py                    # into MLflow: ./mlflow.db, or your server
    python examples/train_gpt.py --backend wandb    # into W&B, offline unless WANDB_MODE says otherwise
    python examples/train_gpt.py --backend local    # into memlog's own files only

All of it is plain PyTorch, except two lines in ``main``: ``memlog.init`` and ``memlog.finish``. After some
steps it begins to make a common mistake: memlog raises an alert, and names the cause during the training.
"""

# PyTorch leaves Tensor.backward without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics  # English text that comes with every Python
from urllib.parse import urlsplit

import psutil
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

import memlog

CONTEXT = 128
WIDTH = 128
HEADS = 4
LAYERS = 4
BATCH_SIZE = 4
LEARNING_RATE = 2e-3


class Block(nn.Module):
    """One transformer layer: self-attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def attend(self, x: Tensor) -> Tensor:
        """Return causal self-attention over ``x``."""
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3 * HEADS, WIDTH // HEADS)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, of ``[batch, length, WIDTH]``, plus this layer's output."""
        x = x + self.attend(self.attention_norm(x))
        update: Tensor = self.mlp(self.mlp_norm(x))
        return x + update


class GPT(nn.Module):
    """Network that predicts the next character at every position of a text."""

    def __init__(self, alphabet_size: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet_size, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, alphabet_size)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of ``[batch, length, alphabet_size]`` for a text of ``[batch, length]``."""
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.blocks(self.characters(text) + self.places(places))
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Corpus:
    """Text of Python's own documentation as numbers, one per character, split for training and validation."""

    def __init__(self, device: str) -> None:
        text = "\n".join(topics.values())
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        numbers = torch.tensor([number[character] for character in text], device=device)
        self.size = len(text)
        self.validation, self.training = numbers.tensor_split([self.size // 10])

    def decode(self, numbers: Tensor) -> str:
        """Return the characters of these numbers."""
        return "".join(self.alphabet[i] for i in numbers.tolist())


def random_batch(numbers: Tensor, size: int = BATCH_SIZE) -> tuple[Tensor, Tensor]:
    """Return pieces of the text, and the same pieces shifted by one character."""
    starts = torch.randint(len(numbers) - CONTEXT, (size, 1))
    pieces = numbers[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: GPT, text: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def train(model: GPT, corpus: Corpus, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    process = psutil.Process()
    validation: list[Tensor] = []
    pieces = max(1, 420 // steps)  # so that the mistake shows in a short run, too
    status = TextColumn("loss {task.fields[loss]:.2f} • {task.fields[memory]:,.0f} MiB")
    speed = TextColumn("• {task.fields[speed]:.1f} steps/s •")
    with Progress(
        "step", MofNCompleteColumn(), BarColumn(), status, speed, TimeRemainingColumn()
    ) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"), memory=0, speed=0)
        for step in range(steps):
            loss = loss_of(model, *random_batch(corpus.training))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # memlog notices every step by itself
            if step >= min(40, steps // 2) and step % 2 == 0:
                # The mistake: without torch.no_grad() each of these losses keeps its activations alive.
                validation.append(loss_of(model, *random_batch(corpus.validation, pieces)))

            progress.update(
                task,
                advance=1,
                loss=loss.item(),
                memory=process.memory_info().rss / 1024**2,
                speed=progress.tasks[task].speed or 0,
            )


@torch.no_grad()
def mean_loss(model: GPT, numbers: Tensor) -> float:
    losses = [loss_of(model, *random_batch(numbers)) for _ in range(16)]
    return torch.stack(losses).mean().item()


def print_losses(when: str, model: GPT, corpus: Corpus) -> None:
    training = mean_loss(model, corpus.training)
    validation = mean_loss(model, corpus.validation)
    print(f"{when}: training loss {training:.2f}, validation loss {validation:.2f}")


@torch.no_grad()
def write(model: GPT, corpus: Corpus, length: int = 240) -> str:
    text = torch.tensor([[corpus.alphabet.index("\n")]], device=corpus.training.device)
    for _ in range(length):
        scores = model(text[:, -CONTEXT:])[:, -1]
        text = torch.cat([text, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
    return corpus.decode(text[0]).strip()


def too_much(device: str) -> str:
    """Return an alert rule with a threshold that only the mistake exceeds."""
    if device != "cpu":
        return "device.allocated > 250 MiB"
    now = psutil.Process().memory_info().rss
    return f"host.rss > {now // 1024**2 + 300} MiB"


def print_where_to_look(backend: str) -> None:
    print(
        "\nLook at the memory of this run:\n"
        "  memlog show latest\n"
        "  memlog open latest    (which layer holds how much, in your browser)"
    )
    if backend == "wandb":
        print("  wandb sync wandb/offline-run-*    (uploads it: it was recorded offline)")
    if backend != "mlflow":
        return
    uri = os.environ["MLFLOW_TRACKING_URI"]
    address = urlsplit(uri)
    if address.scheme in ("http", "https"):
        host = address.netloc.rpartition("@")[2]  # without user and password
        print(f"  open {address.scheme}://{host}{address.path}")
    else:
        store = '"$MLFLOW_TRACKING_URI"' if address.netloc else uri  # the URI may hold a password
        print(
            f"  mlflow ui --backend-store-uri {store}   "
            "(http://127.0.0.1:5000: Model training, memlog-demo, its run, Model metrics)"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT recorded by memlog.")
    parser.add_argument("--steps", type=int, default=420, help="optimizer steps (%(default)s)")
    parser.add_argument("--backend", default="mlflow", help="mlflow, wandb, local, … (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    # Half of the cores: on a busy machine many threads that wait for each other are slower than few.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The same as MLflow's default; older versions would use a folder of files instead.
    os.environ.setdefault("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    os.environ.setdefault("WANDB_MODE", "offline")  # the example needs no account

    corpus = Corpus(device)
    model = GPT(len(corpus.alphabet)).to(device)
    memlog.init(
        args.backend,
        project="memlog-demo",
        name=f"gpt-seed-{args.seed}",
        model=model,
        layers=True,
        alerts=[too_much(device)],
    )

    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"A GPT of {millions:.1f} M parameters learns {corpus.size / 1e3:.0f} kB of English "
        f"in {args.steps} steps on {device}; memory goes to {args.backend}."
    )
    print_losses("before", model, corpus)
    train(model, corpus, args.steps)
    print_losses("after", model, corpus)
    print(f"\nIt writes like this now:\n\n{write(model, corpus)}")

    print_where_to_look(args.backend)
    memlog.finish()  # its last lines are the verdict and where to look


if __name__ == "__main__":
    main()
