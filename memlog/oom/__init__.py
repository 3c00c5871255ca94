"""Detection of failed allocations in the trainer's process, with the requested size and the layer."""
