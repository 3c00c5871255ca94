"""What ``src/utils/gpu_memory_profiler.py`` told in fixed figures: what a step of training takes, derived.

``python examples/gpu_memory_profiler.py`` prints it for the UNet that HYCO's documents describe.
"""

from memlog.tracer.estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
