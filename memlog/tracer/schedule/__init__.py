"""Which steps of a session are traced, and which trace is kept."""
