"""Comparison of estimates of a training step's memory with the allocator's own figures."""
