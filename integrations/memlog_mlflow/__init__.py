"""memlog's integration with MLflow.

Importing this package, for `backend`, does not import mlflow. The sink calls MLflow; `backend.open_sink`
imports it in memlog's helper process.
"""

from memlog_mlflow.backend import MlflowBackend

backend = MlflowBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
