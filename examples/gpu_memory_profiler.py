"""Memory of a UNet's training on a GPU, estimated without a GPU and without computing anything.

python examples/gpu_memory_profiler.py                       # the network of HYCO's documents, batch 16
python examples/gpu_memory_profiler.py --batch-size 32 --resolution 256
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from memlog.compat.gpu_memory_profiler import MemoryEstimate, estimate_memory

try:
    from phiml.backend.torch.nets import u_net
except ImportError:
    raise SystemExit(
        "The network comes from phiml: pip install 'phiml>=1.14.1,!=1.16.1' phiflow"
    ) from None

MIB = 1024**2
INSTRUCTIONS = """\
To measure it on your GPU, with your data:
  memlog run -- python train.py        # every step's memory, with nothing changed in the script
  memlog.init(model=model, layers=True)   # and, at some steps, the memory of each layer
  memlog advise latest                 # what would make the worst step smaller, and by how much
  memlog compare RUN_A RUN_B           # what a change did"""


class Setting(NamedTuple):
    """One way to train."""

    batch: int
    steps: int
    resolution: int
    autocast: bool = False
    checkpointed: bool = False
    accumulate: int = 1


def network() -> nn.Module:
    """Return a network with two channels in and out, four levels and 64 filters: 593,794 parameters."""
    net: nn.Module = u_net(2, 2, levels=4, filters=64)
    return net


def estimate(net: nn.Module, setting: Setting) -> MemoryEstimate:
    """Estimate a step of autoregressive training: the network continues from its own predictions."""
    side = setting.resolution

    def loss(model: Any) -> Tensor:
        frame = torch.randn(setting.batch, 2, side, side)
        following = torch.randn(setting.steps, setting.batch, 2, side, side)
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.autocast):
            for target in following:
                if setting.checkpointed:
                    frame = checkpoint(model, frame, use_reentrant=False)
                else:
                    frame = model(frame)
                losses.append(mse_loss(frame, target))
        return torch.stack(losses).mean()

    return estimate_memory(net, loss, accumulate=setting.accumulate)


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate the memory of training a UNet on a GPU.")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="of the rollout (3)")
    parser.add_argument("--resolution", type=int, default=128)
    options = parser.parse_args()
    base = Setting(options.batch_size, options.steps, options.resolution)
    net = network()
    whole = estimate(net, base)
    count = sum(parameter.numel() for parameter in net.parameters())
    print(f"UNet of {count:,} parameters, {base.resolution} x {base.resolution} cells")
    print(f"Batch {base.batch}, {base.steps} steps, Adam:")
    print(whole.text())
    print("Peak with a change:")
    half = max(1, base.batch // 2)
    for name, setting in {
        "twice the batch": base._replace(batch=2 * base.batch),
        "half the batch": base._replace(batch=half),
        "half the batch, added up twice": base._replace(batch=half, accumulate=2),
        "one step more": base._replace(steps=base.steps + 1),
        "bfloat16 autocast": base._replace(autocast=True),
        "checkpointing": base._replace(checkpointed=True),
    }.items():
        peak = estimate(net, setting).peak
        print(f"  {name + ':':32} {peak / MIB:8.1f} MiB  {peak / whole.peak - 1:+.0%}")
    print(INSTRUCTIONS)


if __name__ == "__main__":
    main()
