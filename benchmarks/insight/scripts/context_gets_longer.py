"""Training on its own history: at each step the new tokens are appended to the context, and the whole context is
the next input. No tensor leaks, but every step needs more than the last."""

import os

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(os.environ.get("SEED", "0")))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary=512, width=64, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main():
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = torch.randint(0, 512, (4, 16))
    for step in range(130):
        logits = model(context[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), context[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sampled = torch.multinomial(logits[:, -6:].detach().softmax(-1).flatten(0, 1), 1).view(
            4, -1
        )
        context = torch.cat([context, sampled], 1)  # leak
    print(step, loss.item(), context.shape)


if __name__ == "__main__":
    main()
