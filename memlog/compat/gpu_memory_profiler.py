"""Memory of a training step, computed from the model; ``src/utils/gpu_memory_profiler.py`` had fixed figures.

``python examples/gpu_memory_profiler.py`` prints it for the UNet of HYCO's documents.
"""

from memlog.estimates.phases_of_a_step import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
