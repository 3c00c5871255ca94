"""A module in the style of a training framework: `training_step` returns a dict, and the loop stores it in
`training_step_outputs` for a hook at the epoch's end that never comes, because there is one long epoch. The
logits of a vocabulary of 4,000 words stay, with their graph's nodes."""

import os

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 4000


class LanguageModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.encoder = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, WORDS)
        self.training_step_outputs = []

    def forward(self, tokens):
        states, _ = self.encoder(self.embedding(tokens))
        return self.head(states[:, -1])

    def training_step(self, batch):
        tokens, target = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits, target)
        return {"loss": loss, "logits": logits, "target": target}

    def on_train_epoch_end(self):
        logits = torch.cat([output["logits"] for output in self.training_step_outputs])
        self.training_step_outputs.clear()
        return logits.argmax(1)


def fit(module, steps):
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(0, WORDS, (80, 12)), torch.randint(0, WORDS, (80,))
        output = module.training_step(batch)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        module.training_step_outputs.append(output)  # leak


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    module = LanguageModule()
    fit(module, 200)
    print(len(module.training_step_outputs), "outputs kept")
