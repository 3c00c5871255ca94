"""memlog's integration with TensorBoard.

Importing this package, for `backend`, does not import tensorboard. The sink writes event files;
`backend.open_sink` imports tensorboard's file format for it in memlog's helper process, but neither torch nor
TensorFlow.
"""

from memlog_tensorboard.backend import TensorboardBackend

backend = TensorboardBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
