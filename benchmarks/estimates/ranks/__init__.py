"""Comparison of estimates of one of several ranks with the allocators of real and of simulated ranks."""
