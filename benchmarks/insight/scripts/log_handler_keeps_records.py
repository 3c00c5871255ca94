"""logging.handlers.MemoryHandler without a target and with a capacity that is never reached: each record, with
the arguments of its message, stays in the handler's buffer."""

import logging
import logging.handlers
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("SEED", "0")))

log = logging.getLogger("train")
log.setLevel(logging.DEBUG)
log.propagate = False
handler = logging.handlers.MemoryHandler(capacity=10_000_000, flushLevel=logging.CRITICAL)
log.addHandler(handler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(200, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU())
        self.head = nn.Linear(600, 1)

    def forward(self, x):
        return self.head(self.body(x))


net = Net()
optimizer = torch.optim.Adam(net.parameters())
for step in range(150):
    x = torch.randn(192, 200)
    output = net(x)
    loss = (output[:, 0] - x[:, 0] * x[:, 1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for row, value in zip(x[:150].tolist(), output[:150, 0].tolist(), strict=True):
        log.debug("step %d: %.4f for %s", step, value, row)  # leak
print(loss.item(), len(handler.buffer), "records")
