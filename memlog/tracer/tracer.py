"""What a trainer holds: `MemoryTracer`, with the face of the tracer that memlog takes over from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, get_args

from memlog._internal import terminal
from memlog._internal.diagnostics import Diagnostics
from memlog.errors import ConfigurationError, MissingExtraError
from memlog.trace import exporters
from memlog.trace.phases import PhaseLevel, PhaseName, phase_levels
from memlog.trace.records import EngineChoice, LayerFigures, RecordedTrace, TraceResult
from memlog.trace.timeline import LayerMemoryStats, MemoryEvent, layer_stats, replay
from memlog.tracer.attribution.user_scopes import scope
from memlog.tracer.summary import summary_text

if TYPE_CHECKING:
    from memlog.tracer.window import TraceWindow

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]


class MemoryTracer:
    """Traces whose memory it is: of which module, in which phase, for what.

    ::

        tracer = memlog.MemoryTracer()
        with tracer.trace(model):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        tracer.print_summary()
        tracer.export_flame_graph("profile.speedscope.json")

    Every `trace` is a recording of its own; what the other methods tell is of the one that ended last. They
    may be nested, and run on several threads with a tracer each.

    Args:
        max_events: Events that are kept one by one, 32 bytes each. Past them totals and peaks go on, and
            `result` says ``truncated``.
        device: As torch writes it (``"cpu"``, ``"cuda:0"``); ``None``: where the model is.
        enable_fragmentation_tracking: Whether, on a GPU, the allocator is asked at every module what it has
            reserved (about 20 µs each).
        engine: ``"auto"``; or ``"native"`` (CUDA, XPU), ``"dispatch"`` (CPU), ``"sampler"`` (anywhere).

    Attributes:
        diagnostics: Errors inside the tracer, which training never sees.

    Raises:
        ConfigurationError: An argument can't be right.
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
            raise ConfigurationError(f"max_events={max_events!r}: give a whole number above 0")
        if engine not in get_args(EngineChoice):
            raise ConfigurationError(
                f"engine={engine!r}: write one of {', '.join(get_args(EngineChoice))}"
            )
        self.health = Diagnostics()
        self._max_events = max_events
        self._device = str(device) if device is not None else None
        self._readings = enable_fragmentation_tracking
        self._engine = engine
        self._trace: RecordedTrace | None = None
        self._why_none = "nothing has been traced yet; use: with tracer.trace(model): ..."
        if device is not None and "torch" in sys.modules:
            from memlog.tracer.engines.selection import device_of  # noqa: PLC0415 - torch is there already

            device_of(
                (), self._device
            )  # a device that isn't there is said now, not when tracing begins

    @contextmanager
    def trace(self, model: Any = None) -> Iterator[MemoryTracer]:
        """Traces a block: any number of training steps, or a part of one.

        Args:
            model: A ``torch.nn.Module``; ``None``: the first module that is called is taken for it.

        Raises:
            ConfigurationError: The device isn't there, ``engine`` can't trace it, or ``model`` is none.
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
        from memlog.tracer.hooks.deferred_removal import leave_later  # noqa: PLC0415 - torch is there already

        with self.health.contained("analysing a trace"):
            try:
                self._trace = window.stop()
            finally:
                leave_later(window)

    scope = staticmethod(scope)

    @property
    def recording(self) -> RecordedTrace:
        """The trace that ended last: its result, and the events that it was made from.

        Raises:
            ConfigurationError: Nothing has been traced yet, or the last trace could not begin.
        """
        if self._trace is None:
            raise ConfigurationError(self._why_none)
        return self._trace

    @property
    def result(self) -> TraceResult:
        """What the trace came to: figures, which engine ran, how exact it is, what it could not see."""
        return self.recording.result

    @property
    def events(self) -> list[MemoryEvent]:
        """The kept events, decoded (a few hundred bytes each)."""
        return list(replay(self.recording))

    def get_layer_stats(self) -> dict[str, LayerMemoryStats]:
        """The figures of every module that did anything, by its path; the model's is its class's name.

        (Where a child is called that, the model's has "(model)" behind.)
        """
        return layer_stats(self.result)

    def get_peak_memory_per_layer(self) -> dict[str, int]:
        """Most bytes live while each module was active, in any phase; without those of unknown peak."""
        return {
            path: stats.peak_allocated
            for path, stats in self.get_layer_stats().items()
            if stats.peak_allocated is not None
        }

    def get_fragmentation_stats(self) -> dict[str, float | None]:
        """Mean of ``(reserved - allocated) / reserved`` at each module's entries and exits, 0 to 1.

        ``None`` where it is unknown: on the CPU nothing is reserved. The whole run's, and the reason where
        there is none, stand in ``result.fragmentation`` and ``result.fragmentation_reason``.
        """
        return {path: stats.avg_fragmentation for path, stats in self.get_layer_stats().items()}

    def get_layer_figures(self, path: str) -> LayerFigures:
        """All figures of one module, by phase.

        Raises:
            KeyError: It was not active.
        """
        for layer in self.result.layers:
            if layer.path == path:
                return layer
        raise KeyError(path)

    def get_phase_levels(self) -> dict[PhaseName, PhaseLevel] | None:
        """What was live as the phases of a step ended, and at most, in bytes.

        ``data`` is what comes before the first module is called, then ``forward``, ``backward``,
        ``optimizer``, and ``end``, as far as the step came.

        Returns:
            ``None`` where the trace is not exact or has lost events.
        """
        return phase_levels(self.recording)

    def export_flame_graph(self, output_path: str | PathLike[str]) -> Path:
        """Writes a flame graph for https://www.speedscope.app: bytes at the peak, in order, milliseconds.

        Args:
            output_path: Ends in ``.speedscope.json``, so that the page knows the file; in ``.gz`` for a
                compressed one.

        Returns:
            The file.
        """
        return exporters.write_json(exporters.flame_graph(self.recording), output_path)

    def export_timeline(self, output_path: str | PathLike[str]) -> Path:
        """Writes ``events``, ``layer_stats`` and ``summary`` as JSON; compressed where it ends in ``.gz``."""
        return exporters.write_json(exporters.timeline(self.recording), output_path)

    def export_trace(
        self,
        output_path: str | PathLike[str],
        profiler_trace: str | PathLike[str] | None = None,
    ) -> Path:
        """Writes a trace for https://ui.perfetto.dev or ``chrome://tracing``, with memory as counters.

        Args:
            output_path: Compressed where it ends in ``.gz``.
            profiler_trace: What ``torch.profiler``'s ``export_chrome_trace`` wrote of the same step: layers
                and counters are put beside its operations.

        Raises:
            ConfigurationError: ``profiler_trace`` is none.
        """
        document = exporters.chrome_trace(self.recording)
        if profiler_trace is not None:
            document = exporters.merged(document, exporters.read_profiler_trace(profiler_trace))
        return exporters.write_json(document, output_path)

    def export_snapshot(self, output_path: str | PathLike[str]) -> Path:
        """Writes a CUDA-style snapshot, for https://pytorch.org/memory_viz, of a trace on any device."""
        return exporters.write_pickle(exporters.snapshot(self.recording), output_path)

    def print_summary(self) -> None:
        """Prints the peak, what it is made of, and the layers that hold most of it.

        ``kept fwd`` sums over the calls of a layer's forward what was live at their exits over their entries,
        its children's included: what a later call frees again counts all the same.

        Raises:
            ConfigurationError: Nothing has been traced yet, or the last trace could not begin.
        """
        result = self.result
        with self.health.contained("printing"):
            terminal.out(summary_text(result))

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
                f"trace({model!r:.100}): give a torch.nn.Module, or nothing to find it by itself"
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
