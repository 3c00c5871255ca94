"""`MemoryTracer`, the public tracer. It replaces ``gpu_optimizer.MemoryTracer`` and has the same methods."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex, get_args

from memlog._internal.terminal import format_bytes
from memlog.errors import ConfigurationError, MissingExtraError
from memlog.trace.records import EngineChoice
from memlog.tracer.attribution.user_scopes import scope
from memlog.tracer.last_trace import LastTrace

if TYPE_CHECKING:
    from memlog.tracer.window import TraceWindow


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
            from memlog.tracer.engines.selection import device_of  # noqa: PLC0415 - torch is loaded already

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
        from memlog.tracer.hooks.deferred_removal import remove_when_possible  # noqa: PLC0415 - torch is loaded already

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
