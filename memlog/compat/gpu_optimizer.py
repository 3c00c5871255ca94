"""What was ``gpu_optimizer``: the tracer's three names, with their old arguments.

They are memlog's own. The device is the model's where none is named, so that the same lines run without a
GPU; docs/tracer.md says what is measured where.
"""

from memlog.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
