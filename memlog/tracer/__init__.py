"""The layer tracer: whose memory is it?

`MemoryTracer` is what a trainer holds; `memlog.tracer.window.TraceWindow` is one traced window for whoever
schedules them. Importing this package loads no torch: tracing does.
"""

from memlog.tracer.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
