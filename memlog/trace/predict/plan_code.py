"""Lines of code that make a plan's changes."""

from __future__ import annotations

from typing import Final

from memlog.trace.predict.fitting import PlannedChanges

_PARTS_MOVED: Final = ". The batch is on the host, and its parts go to the device:"


def plan_code(
    changes: PlannedChanges, device: str = "cuda", *, ranks: int = 1, whole_batch: bool = False
) -> str:
    """Return lines to paste into a program that make the changes.

    Args:
        changes: The changes.
        device: Type of the device, such as ``cuda``.
        ranks: Number of processes that train together.
        whole_batch: True if the figures of the plan count the whole batch on the device.
    """
    lines = []
    if changes.checkpointed:
        lines += [
            # A cache of keys would get those of the second forward, too.
            "# After the model is made (a model of transformers with use_cache=False in its configuration):",
            "from functools import partial",
            "from torch.utils.checkpoint import checkpoint",
            f"for path in {list(changes.checkpointed)}:",
            "    module = model.get_submodule(path)",
            "    module.forward = partial(checkpoint, module.forward, use_reentrant=False)",
        ]
    if changes.sharded is not None:
        on_host = changes.parameters_on_host
        policy = ", offload_policy=CPUOffloadPolicy()" * on_host
        lines += [
            f"# Start {ranks} processes: torchrun --nproc-per-node {ranks} (or --nnodes). Give each rank its "
            "own samples.",
            "# When the model is made on the CPU, in place of model.cuda(), before the optimizer is made:",
            "import os",
            f"from torch.distributed.fsdp import {'CPUOffloadPolicy, ' * on_host}fully_shard",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            f'torch.distributed.init_process_group("{"cpu:gloo,cuda:nccl" if on_host else "nccl"}")',
        ]
        if changes.sharded:
            lines += [
                f"for path in {list(changes.sharded)}:",
                f"    fully_shard(model.get_submodule(path){policy})",
            ]
        lines += [f"fully_shard(model{policy})"]
    if changes.one_by_one:
        lines += ["# Where the optimizer is made: pass", "foreach=False"]
    if changes.optimizer:
        package, _, arguments = changes.optimizer.partition("(")
        given = f", {arguments}" if arguments else ")"
        lines += [
            "# Where the optimizer is made (if there are several, in place of each):",
            f"import {package.partition('.')[0]}",
            f"optimizer = {package}(model.parameters(), lr=...{given}",
        ]
    contexts = [f'torch.autocast("{device}", dtype=torch.bfloat16)'] * changes.autocast
    contexts += ["torch.autograd.graph.save_on_cpu(pin_memory=True)"] * changes.on_host
    inside = [f"with {', '.join(contexts)}:"] if contexts else []
    indent = "    " * bool(contexts)
    if changes.parts > 1:
        lines += [
            "# The step" + (":" if whole_batch else _PARTS_MOVED),
            f"for part in batch.chunk({changes.parts}):",
            *(f"    {line}" for line in inside),
            f"    {indent}loss = ...  # of this part",
            f"    (loss / {changes.parts}).backward()",
            "optimizer.step()",
            "optimizer.zero_grad()",
        ]
    elif contexts:
        lines += ["# Around the forward pass and the loss:", *inside, "    loss = ..."]
    return "\n".join(lines)
