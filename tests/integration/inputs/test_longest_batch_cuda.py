"""What memlog tells about the longest batch, compared with the same batch when it is really trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import child

from memlog.events import Alert, Finding
from memlog.journal import RunDirectory, list_runs
from memlog.reports import encode, summarize

pytestmark = pytest.mark.cuda

AT_MOST = 180
"""Maximum seconds that a program runs, also on a busy machine."""

PROGRAM = """
import random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
import memlog

torch.manual_seed(2)
WIDTH, HEADS, BATCH, WORDS = 512, 8, 8, 8000
ATTENTION = {attention}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.projected = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        if ATTENTION:
            size = (*hidden.shape[:2], 3, HEADS, WIDTH // HEADS)
            query, key, value = self.projected(hidden).view(size).permute(2, 0, 3, 1, 4)
            scores = torch.softmax(query @ key.transpose(-1, -2), -1)
            hidden = hidden + (scores @ value).transpose(1, 2).reshape(hidden.shape)
        return hidden + self.narrow(nn.functional.gelu(self.wide(hidden)))

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

model = Reader().cuda()
optimizer = torch.optim.AdamW(model.parameters())

def train(tokens):
    tokens = tokens.cuda()
    out = model(tokens)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def padded(rows):
    ids = [torch.zeros(len(row["input_ids"]), dtype=torch.int64) for row in rows]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)

def rows_of(lengths):
    return [dict(input_ids=[1] * length) for length in lengths]

class AllBut:
    def __init__(self, sampler, last):
        self.sampler, self.last = sampler, last
    def __len__(self):
        return len(self.sampler)
    def __iter__(self):
        return (at for at in self.sampler if at != self.last)

lengths = [int(60 / (0.02 + random.Random(at).random()) ** 0.6) for at in range(1200)]
"""

GROUPED = """
from transformers.trainer_pt_utils import LengthGroupedSampler
lengths[-1] = {longest}
generator = torch.Generator().manual_seed(0)
sampler = AllBut(LengthGroupedSampler(BATCH, lengths=lengths, generator=generator), len(lengths) - 1)
memlog.init("local")
for epoch in range(5):
    for tokens in DataLoader(rows_of(lengths), BATCH, sampler=sampler, collate_fn=padded, drop_last=True):
        torch.cuda.reset_peak_memory_stats()
        train(tokens)
"""
RANDOM = """
lengths[-1] = {longest}
rows = rows_of(lengths)
sampler = AllBut(torch.utils.data.RandomSampler(rows), len(rows) - 1)
memlog.init("local")
for epoch in range(8):
    for tokens in DataLoader(rows, BATCH, sampler=sampler, collate_fn=padded, drop_last=True):
        train(tokens)
"""
BUCKETS = """
lengths = [length for length in (128, 256, 384, 512, 640) for _ in range(10 * BATCH)] + [{longest}] * BATCH
rows = rows_of(lengths)
memlog.init("local")
batches = [list(range(at, at + BATCH)) for at in range(0, 50 * BATCH, BATCH)]
for tokens in DataLoader(rows, batch_sampler=batches, collate_fn=padded):
    train(tokens)
"""
LONGEST = """
for _ in range(3):
    train(torch.zeros(BATCH, 64, dtype=torch.int64))
torch.cuda.reset_peak_memory_stats()
train(torch.zeros(BATCH, {longest}, dtype=torch.int64))
print(torch.cuda.max_memory_allocated())
"""
FINISH = """
memlog.finish()
"""


def trained(
    directory: Path, program: str, *, longest: int = 1024, attention: bool = False, **device: str
) -> RunDirectory:
    text = PROGRAM.format(attention=attention) + program.format(longest=longest) + FINISH
    child.run(text, directory, timeout=AT_MOST, FAKE_CUDA_COPY="4k", **device)
    [run] = list_runs(directory / "memlog_runs")
    return run


def needed(directory: Path, *, longest: int = 1024, attention: bool = False) -> int:
    """Bytes at the peak of a step with a batch of the longest sample, as the allocator tells."""
    text = PROGRAM.format(attention=attention) + LONGEST.format(longest=longest)
    return int(child.run(text, directory, timeout=AT_MOST, FAKE_CUDA_COPY="4k"))


def document(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(summarize(run)))
    return found


@pytest.mark.parametrize("attention", [False, True], ids=["line", "parabola"])
@pytest.mark.parametrize(
    "program", [GROUPED, RANDOM, BUCKETS], ids=["grouped", "random", "buckets"]
)
def test_the_longest_batch_needs_what_was_told(
    tmp_path: Path, program: str, attention: bool
) -> None:
    summary = document(trained(tmp_path, program, attention=attention))
    told = summary["longest_batch"]
    assert (told["size"], told["source"], told["fits"]) == (1024, "data set", True)
    assert told["seen"] < 700
    real, seen = needed(tmp_path, attention=attention), summary["peaks"]["cuda0.allocated"]["bytes"]
    assert told["low_bytes"] <= real <= told["high_bytes"]
    assert told["high_bytes"] - told["low_bytes"] < 0.6 * (real - seen)
    assert "will need" in told["text"]
    assert "cuda0" in told["text"]


def test_a_batch_that_will_not_fit_is_a_finding_and_an_alert(tmp_path: Path) -> None:
    run = trained(tmp_path, GROUPED, longest=1900, attention=True, FAKE_CUDA_MEMORY="3GiB")
    told = document(run)["longest_batch"]
    assert told["fits"] is False
    [finding] = [each for each in run.events() if isinstance(each, Finding)]
    assert (finding.kind, finding.memory) == ("longest_batch", "cuda0")
    [alert] = [each for each in run.events() if isinstance(each, Alert)]
    assert alert.title.startswith(
        "A batch of length 1,900 (the longest sample of the data set, if none is cut or left out) will"
    )
    assert summarize(run).verdict.endswith("that is more than its 3.0 GiB.")


def test_a_run_whose_batches_have_one_length_says_nothing(tmp_path: Path) -> None:
    program = 'memlog.init("local")\nfor _ in range(60):\n    train(torch.zeros(8, 300).long())\n'
    summary = document(trained(tmp_path, program))
    assert summary["longest_batch"] is None
    assert summary["findings"] == []
