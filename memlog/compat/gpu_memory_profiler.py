"""Replacement for ``src/utils/gpu_memory_profiler.py`` of the HYCO project: estimate of a step's memory.

The estimate is computed from the model. The older module contained fixed figures.
``python examples/gpu_memory_profiler.py`` prints the estimate for the UNet in HYCO's documents.
"""

from memlog.estimates.fake_step import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
