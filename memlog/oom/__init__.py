"""Detection of a failed allocation, in the process where it failed: the requested size and the layer."""
