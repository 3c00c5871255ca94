"""memlog beside other tools that record a training's memory: ``python -m benchmarks.comparison``."""
