"""An experiment log as a dict of strings: for each step the decoded predictions and a formatted table are kept
so that a web page can show them."""

import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,"


def decode(ids):
    return "".join(ALPHABET[i % len(ALPHABET)] for i in ids)


class Journal:
    def __init__(self):
        self.pages = {}

    def write(self, step, predictions, scores):
        rows = [
            f"{step:06d} | {number:04d} | {decode(row)} | " + " ".join(f"{s:.6f}" for s in score)
            for number, (row, score) in enumerate(zip(predictions, scores, strict=True))
        ]
        self.pages[f"step-{step}"] = rows  # leak


def main():
    model = nn.Sequential(
        nn.Embedding(29, 48), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.Linear(48, 29)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    journal = Journal()
    for step in range(140):
        text = torch.randint(0, 29, (256, 32))
        logits = model(text)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scores = logits.max(-1).values.tolist()
            journal.write(step, logits.argmax(-1).tolist(), [s * 6 for s in scores])
    print(loss.item(), len(journal.pages))


main()
