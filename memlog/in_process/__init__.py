"""The in-process writer. From the trainer's process, it writes to the user's run in a tracker."""
