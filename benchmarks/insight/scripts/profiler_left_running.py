"""torch.profiler.profile without a schedule, started for a quick look and left on for the whole training. Its
events pile up in the profiler's buffers."""

import os

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(int(os.environ.get("SEED", "0")))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main():
    model = nn.Sequential(*[Block(32) for _ in range(4)], nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=False)
    profiler.start()  # leak
    for step in range(420):
        x = torch.randn(8, 16, 32)
        loss = (model(x)[..., 0] - x.mean(-1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, loss.item())
    os._exit(0)  # stopping would take minutes


if __name__ == "__main__":
    main()
