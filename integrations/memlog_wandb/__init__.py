"""memlog's integration with Weights & Biases.

Importing this package does not import wandb. memlog writes to a user's open run from the training process
(`memlog_wandb.in_process`), because only this way leaves the user's rows unchanged. memlog writes to its own
run from its helper process, with the sink that `backend.open_sink` imports there.
"""

from memlog_wandb.backend import WandbBackend

backend = WandbBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
