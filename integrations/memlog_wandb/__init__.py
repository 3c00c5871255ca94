"""memlog's integration with Weights & Biases.

Importing this package does not import wandb. memlog writes to a user's open run from the trainer's process
(`memlog_wandb.in_process`), because no other way keeps the user's rows unchanged. memlog writes to its own
run from its helper process, with the sink that `backend.open_sink` imports there.
"""

from memlog_wandb.backend import WandbBackend

backend = WandbBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
