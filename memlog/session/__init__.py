"""Session in the trainer's process: arguments, the parts of a recording, and the end of a run."""
