"""Layer tracer: attributes memory to modules, phases and categories.

Trainers use `MemoryTracer`. Code that schedules its own traces uses
`memlog.tracer.window.TraceWindow`. Importing this package does not load torch; tracing does.
"""

from memlog.trace.summary import LayerMemoryStats, MemoryEvent
from memlog.tracer.tracer import MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
