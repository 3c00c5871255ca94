"""memlog's integration with Trackio.

Importing this package does not import trackio. Only the sink calls trackio. `backend.open_sink` imports the
sink in memlog's helper process.
"""

from memlog_trackio.backend import TrackioBackend

backend = TrackioBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
