"""memlog's integration with TensorBoard.

Importing this package does not import tensorboard. `backend.open_sink` imports the sink in memlog's helper
process. The sink imports only tensorboard's file format, and neither torch nor TensorFlow.
"""

from memlog_tensorboard.backend import TensorboardBackend

backend = TensorboardBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
