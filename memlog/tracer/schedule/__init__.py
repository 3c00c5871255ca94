"""Schedule of a session's traces: which steps are traced, and which trace is kept."""
