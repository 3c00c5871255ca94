"""Growth of memory in the training process: detection, and what holds the memory."""
