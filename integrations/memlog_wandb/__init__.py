"""memlog's integration with Weights & Biases.

Importing this package does not import wandb. A run that the user has open is written in
process (`memlog_wandb.in_process`), beside the user's own rows: W&B has no other way that keeps those rows
unchanged. A run of memlog's own is written by the sink, which `backend.open_sink` imports in memlog's helper
process.
"""

from memlog_wandb.backend import WandbBackend

backend = WandbBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
