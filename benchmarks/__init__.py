"""Benchmarks of the cost of memlog in loops with and without it: ``python -m benchmarks``."""
