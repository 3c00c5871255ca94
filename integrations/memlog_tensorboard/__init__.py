"""memlog's integration with TensorBoard.

Importing this package does not import tensorboard. Only the sink needs tensorboard's file format;
`backend.open_sink` imports the sink in memlog's helper process, but neither torch nor TensorFlow.
"""

from memlog_tensorboard.backend import TensorboardBackend

backend = TensorboardBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
