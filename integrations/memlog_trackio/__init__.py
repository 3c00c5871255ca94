"""memlog's integration with Trackio.

Importing this package does not import trackio. memlog writes to Trackio only from its own processes, with the
sink that `backend.open_sink` returns.
"""

from memlog_trackio.backend import TrackioBackend

backend = TrackioBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
