"""Replacement of ``gpu_optimizer``: the tracer's three names, with their old arguments.

The names are memlog's own classes. The default device is the model's, so the same program runs without a GPU.
docs/tracer.md lists which values are measured on which device.
"""

from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
