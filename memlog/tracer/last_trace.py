"""Figures and exports of the last trace of a `MemoryTracer`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from memlog._internal import terminal
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError
from memlog.trace import exporters
from memlog.trace.phases import PhaseLevel, PhaseName, phase_levels
from memlog.trace.records import LayerFigures, RecordedTrace, TraceResult
from memlog.trace.summary import summary_text
from memlog.trace.timeline import LayerMemoryStats, MemoryEvent, layer_stats, replay


class LastTrace:
    """Figures and exports of the trace that ended last.

    Attributes:
        health: Counts of errors inside the tracer.
    """

    def __init__(self) -> None:
        self.health = Diagnostics()
        self._trace: RecordedTrace | None = None
        self._why_none = "nothing has been traced yet; use: with tracer.trace(model): ..."

    @property
    def recording(self) -> RecordedTrace:
        """Trace that ended last: its result and its kept events.

        Raises:
            ConfigurationError: No trace has ended yet, or the last trace could not begin.
        """
        if self._trace is None:
            raise ConfigurationError(self._why_none)
        return self._trace

    @property
    def result(self) -> TraceResult:
        """Result of the trace: figures, the engine that ran, exactness, and limitations."""
        return self.recording.result

    @property
    def events(self) -> list[MemoryEvent]:
        """Kept events, decoded. Each event takes a few hundred bytes."""
        return list(replay(self.recording))

    def get_layer_stats(self) -> dict[str, LayerMemoryStats]:
        """Return the figures of every module that was active, by the module's path.

        The model's path is the name of its class. If a child has that name, " (model)" is appended.
        """
        return layer_stats(self.result)

    def get_peak_memory_per_layer(self) -> dict[str, int]:
        """Return each module's peak by path: the most live bytes while the module was active, in any phase.

        A module whose peak is unknown is left out.
        """
        return {
            path: stats.peak_allocated
            for path, stats in self.get_layer_stats().items()
            if stats.peak_allocated is not None
        }

    def get_fragmentation_stats(self) -> dict[str, float | None]:
        """Return each module's mean fragmentation, by the module's path.

        The fragmentation is ``(reserved - allocated) / reserved``, from 0 to 1. It is read at the module's
        entries and exits. ``None`` means unknown: on the CPU nothing is reserved. `result` has the
        fragmentation of the whole trace (``fragmentation``), or the reason why it is unknown
        (``fragmentation_reason``).
        """
        return {path: stats.avg_fragmentation for path, stats in self.get_layer_stats().items()}

    def get_layer_figures(self, path: str) -> LayerFigures:
        """Return all figures of one module, by phase.

        Raises:
            KeyError: The module was not active.
        """
        for layer in self.result.layers:
            if layer.path == path:
                return layer
        raise KeyError(path)

    def get_phase_levels(self) -> dict[PhaseName, PhaseLevel] | None:
        """Return the live bytes at the end of each phase of a step, and their maximum during the phase.

        ``data`` is the time before the first module is called. ``forward``, ``backward``, ``optimizer`` and
        ``end`` follow if the step reached them. ``end`` begins when a backward pass or an optimizer's step
        ends, and lasts until another phase begins. Return ``None`` if the engine was ``sampler``, or if the
        trace does not keep every event.
        """
        return phase_levels(self.recording)

    def export_flame_graph(self, output_path: str | PathLike[str]) -> Path:
        """Write a flame graph of bytes at the peak, allocations and times for https://www.speedscope.app.

        The site recognizes the format by the ending ``.speedscope.json``. Add ``.gz`` to compress the file.
        """
        return exporters.write_json(exporters.flame_graph(self.recording), output_path)

    def export_timeline(self, output_path: str | PathLike[str]) -> Path:
        """Write events, statistics, layers and summary as JSON.

        The file is compressed if the path ends in ``.gz``.
        """
        return exporters.write_json(exporters.timeline(self.recording), output_path)

    def export_trace(
        self,
        output_path: str | PathLike[str],
        profiler_trace: str | PathLike[str] | None = None,
    ) -> Path:
        """Write a trace for https://ui.perfetto.dev or ``chrome://tracing``, with memory as counters.

        Args:
            output_path: Path of the file. The file is compressed if the path ends in ``.gz``.
            profiler_trace: File that ``torch.profiler``'s ``export_chrome_trace`` wrote for the same step.
                Layers and counters are added to the operations in this file.

        Raises:
            ConfigurationError: ``export_chrome_trace`` did not write ``profiler_trace``, or this file is
                larger than 1 GiB.
        """
        document = exporters.chrome_trace(self.recording)
        if profiler_trace is not None:
            document = exporters.merged(document, exporters.read_profiler_trace(profiler_trace))
        return exporters.write_json(document, output_path)

    def export_snapshot(self, output_path: str | PathLike[str]) -> Path:
        """Write a CUDA-style snapshot for https://pytorch.org/memory_viz. The trace may be of any device."""
        return exporters.write_pickle(exporters.snapshot(self.recording), output_path)

    def print_summary(self) -> None:
        """Print the peak, its categories, and the layers that hold most of it.

        The column ``kept fwd`` is a sum over a layer's forward calls, children included. Each call adds the
        live bytes at its exit minus those at its entry. Bytes that a later call frees are not subtracted.

        Raises:
            ConfigurationError: No trace has ended yet, or the last trace could not begin.
        """
        result = self.result
        with self.health.contained("printing"):
            terminal.out(summary_text(result))
