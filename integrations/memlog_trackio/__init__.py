"""memlog's integration with Trackio.

Importing this package, for `backend`, does not import trackio. The sink calls trackio; `backend.open_sink`
imports it in memlog's helper process.
"""

from memlog_trackio.backend import TrackioBackend

backend = TrackioBackend()
"""Object that the entry point ``memlog.sinks`` names."""

__all__ = ["backend"]
