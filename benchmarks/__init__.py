"""Benchmarks of the cost of memlog, in loops with and without memlog: ``python -m benchmarks``."""
