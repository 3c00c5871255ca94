"""The in-process writer: writes to a tracker's run in the trainer's process, beside the user's own rows."""
