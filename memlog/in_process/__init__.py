"""The in-process writer. From the training process, it writes to the user's run in a tracker."""
