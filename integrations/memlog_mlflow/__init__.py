"""memlog's integration with MLflow.

Importing this package does not import mlflow. Only the sink calls MLflow. `backend.open_sink` imports the
sink in memlog's helper process.
"""

from memlog_mlflow.backend import MlflowBackend

backend = MlflowBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
