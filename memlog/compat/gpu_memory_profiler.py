"""Replacement of ``src/utils/gpu_memory_profiler.py``: an estimate of a training step's memory.

The estimate is computed from the model. The older module contained fixed figures.
``python examples/gpu_memory_profiler.py`` prints the estimate for the UNet of HYCO's documents.
"""

from memlog.estimates.phases_of_a_step import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
