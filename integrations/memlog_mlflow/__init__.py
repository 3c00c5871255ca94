"""memlog's integration with MLflow.

`backend` is the light half: importing this package loads no mlflow. The sink, which does the
talking, is imported by `backend.open_sink`, in memlog's helper process.
"""

from memlog_mlflow.backend import MlflowBackend

backend = MlflowBackend()
"""What the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
