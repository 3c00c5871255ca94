"""memlog's integration with MLflow.

Importing this package does not import mlflow. memlog writes to MLflow only from its own processes, with the
sink that `backend.open_sink` returns.
"""

from memlog_mlflow.backend import MlflowBackend

backend = MlflowBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
