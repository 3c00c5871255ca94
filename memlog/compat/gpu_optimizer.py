"""Replacement of ``gpu_optimizer``: the tracer's three names, with their old arguments.

They are memlog's own classes. The default device is the model's, so the same lines run without a GPU.
docs/tracer.md lists what is measured on which device.
"""

from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
