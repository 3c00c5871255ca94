"""Replacement of ``gpu_optimizer``: three classes of memlog with the old names and the old arguments.

The classes come from `memlog.tracer`. The default device is the model's, so the same program runs without a
GPU. docs/tracer.md lists which values are measured on which device.
"""

from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
