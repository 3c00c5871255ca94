"""memlog's integration with Trackio.

Importing this package does not import trackio. memlog writes to Trackio only from its own processes, with the
sink that `backend.open_sink` returns.
"""

from memlog_trackio.backend import TrackioBackend

backend = TrackioBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
