"""What memlog costs, measured side by side: ``python -m benchmarks``."""
