"""Exports of traces in formats that other programs read, one module per format."""

from memlog.trace.exporters.chrome import chrome_trace, merged, read_profiler_trace
from memlog.trace.exporters.cuda_snapshot import snapshot
from memlog.trace.exporters.files import write_json, write_pickle, write_text
from memlog.trace.exporters.flame_page import flame_page
from memlog.trace.exporters.snapshot_graph import snapshot_graph
from memlog.trace.exporters.speedscope import flame_graph
from memlog.trace.exporters.trace_plot import trace_plot
from memlog.trace.timeline import timeline

__all__ = [
    "chrome_trace",
    "flame_graph",
    "flame_page",
    "merged",
    "read_profiler_trace",
    "snapshot",
    "snapshot_graph",
    "timeline",
    "trace_plot",
    "write_json",
    "write_pickle",
    "write_text",
]
