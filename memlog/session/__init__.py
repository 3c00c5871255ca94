"""Session in the training process: arguments, the parts of a recording, and the end of a run."""
