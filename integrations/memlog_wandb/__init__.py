"""memlog's integration with Weights & Biases.

`backend` is the light half: importing this package loads no wandb. A run that the user has open is
written in process (`memlog_wandb.in_process`), beside the user's own rows, since W&B knows no other
way that leaves them alone. A run of memlog's own is written by the sink, which
`backend.open_sink` imports in memlog's helper process.
"""

from memlog_wandb.backend import WandbBackend

backend = WandbBackend()
"""What the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
