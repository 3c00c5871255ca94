"""Detection of failed allocations in the training process, and of their size and layer."""
