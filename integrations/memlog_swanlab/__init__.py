"""memlog's integration with SwanLab.

Importing this package does not import swanlab. memlog writes from its own processes, in the form of SwanLab's
offline runs, with the sink that `backend.open_sink` returns. ``swanlab sync`` uploads such a run.
"""

from memlog_swanlab.backend import SwanlabBackend

backend = SwanlabBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
