"""The in-process writer: writes to the user's run in a tracker, in the trainer's process."""
