"""Writing to a tracker's run in the trainer's process, beside the user's own rows."""
