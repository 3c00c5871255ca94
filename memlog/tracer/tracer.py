"""`MemoryTracer`, the public tracer. It replaces ``gpu_optimizer.MemoryTracer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, get_args

from memlog._internal import terminal
from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import format_bytes
from memlog.errors import ConfigurationError, MissingExtraError
from memlog.trace import exporters
from memlog.trace.accounting import PhaseLevel, PhaseName, phase_levels
from memlog.trace.records import EngineChoice, LayerFigures, RecordedTrace, TraceResult
from memlog.trace.summary import LayerMemoryStats, MemoryEvent, layer_stats, replay, summary_text
from memlog.tracer.user_scopes import scope

if TYPE_CHECKING:
    from memlog.tracer.window import TraceWindow


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


class MemoryTracer(LastTrace):
    """Tracer that attributes memory to the modules that allocate it, by phase and category.

    ::

        tracer = memlog.MemoryTracer()
        with tracer.trace(model):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        tracer.print_summary()
        tracer.export_flame_graph("profile.speedscope.json")

    Each `trace` block makes a new recording. All other methods describe the recording that ended last.
    Tracers may be nested, and several threads may trace at once with one tracer each.

    Args:
        max_events: Maximum number of events to keep individually, 32 bytes each. If there are more events,
            totals and peaks stay complete, and ``result.truncated`` is true.
        device: Device to trace, as torch writes it (``"cpu"``, ``"cuda:0"``). ``None``: the device that holds
            most of the model.
        enable_fragmentation_tracking: On a GPU, True to read the allocator's reserved bytes at every
            module entry and exit (about 20 µs each).
        engine: ``"auto"``, ``"native"`` (CUDA, XPU), ``"dispatch"`` (CPU) or ``"sampler"`` (any device).

    Attributes:
        health: Counts of errors inside the tracer. The tracer never raises them into training.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        max_events: int = 100_000,
        device: str | None = None,
        enable_fragmentation_tracking: bool = True,
        *,
        engine: EngineChoice = "auto",
    ) -> None:
        if not _is_whole(max_events) or max_events < 1:
            raise ConfigurationError(f"max_events={max_events!r}: write a whole number above 0")
        if engine not in get_args(EngineChoice):
            raise ConfigurationError(
                f"engine={engine!r}: write one of {', '.join(get_args(EngineChoice))}"
            )
        super().__init__()
        self._max_events = max_events
        self._device = str(device) if device is not None else None
        self._readings = enable_fragmentation_tracking
        self._engine = engine
        if device is not None and "torch" in sys.modules:
            from memlog.tracer.window import device_of  # noqa: PLC0415 - torch is loaded already

            device_of((), self._device)  # raise for a missing device now, not when tracing begins

    @contextmanager
    def trace(self, model: Any = None) -> Iterator[MemoryTracer]:
        """Trace a block of code: any number of training steps, or a part of a step.

        Args:
            model: A ``torch.nn.Module``. ``None``: the first module that the block calls.

        Raises:
            ConfigurationError: The device does not exist, ``engine`` can't trace it, or ``model`` is not a
                module.
            MissingExtraError: torch is not installed.
        """
        self._trace = None
        self._why_none = "the last trace could not begin: tracer.health.faults says why"
        window = self._window(model)
        begun = False
        with self.health.contained("beginning a trace"):
            window.start()
            begun = True
        try:
            yield self
        finally:
            if begun:
                self._end(window)

    def _end(self, window: TraceWindow) -> None:
        from memlog.tracer.function_patch import remove_when_possible  # noqa: PLC0415 - torch is loaded already

        with self.health.contained("analysing a trace"):
            try:
                self._trace = window.stop()
            finally:
                remove_when_possible(window)

    scope = staticmethod(scope)

    def __repr__(self) -> str:
        """Return the figures of the last trace, or the reason why there is no trace."""
        if self._trace is None:
            return f"<memlog.MemoryTracer: {self._why_none}>"
        result = self._trace.result
        return (
            f"<memlog.MemoryTracer: peak {format_bytes(result.peak)} on {result.device}, "
            f"{result.events:,} events, {result.exactness}>"
        )

    def _repr_html_(self) -> str | None:
        """Return the last trace as HTML; ``None`` if there is no trace.

        If the result is ``None``, a notebook shows the text of ``repr``.
        """
        if self._trace is None:
            return None
        from memlog.reports.notebook import trace_html  # noqa: PLC0415 - only notebooks need it

        return trace_html(self._trace)

    def _window(self, model: Any) -> TraceWindow:
        try:
            from memlog.tracer.window import TraceWindow  # noqa: PLC0415 - loads torch, which `import memlog` must not
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingExtraError(
                "tracing needs torch, which is not installed: pip install torch"
            ) from None
        if model is not None and not isinstance(model, sys.modules["torch"].nn.Module):
            raise ConfigurationError(
                f"trace({model!r:.100}): give a torch.nn.Module, or call trace() without a model"
            )
        return TraceWindow(
            model,
            device=self._device,
            engine=self._engine,
            max_events=self._max_events,
            readings=self._readings,
            diagnostics=self.health,
        )


def _is_whole(number: object) -> bool:
    return isinstance(number, SupportsIndex) and not isinstance(number, bool)
