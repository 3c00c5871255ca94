"""Exports of traces in formats that other programs read."""

from memlog.trace.exporters.files import write_json, write_pickle, write_text
from memlog.trace.exporters.pages import flame_page, trace_plot
from memlog.trace.exporters.profiles import (
    chrome_trace,
    flame_graph,
    merged,
    read_profiler_trace,
    snapshot,
)
from memlog.trace.exporters.snapshots import snapshot_graph
from memlog.trace.summary import timeline

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
