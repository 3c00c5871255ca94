"""One traced window, from outside: what the `MemoryTracer` and whoever schedules windows stand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.trace.accounting import Accountant
from memlog.trace.records import EngineChoice, RecordedTrace
from memlog.trace.result import TraceFacts, build
from memlog.tracer import torch_private
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.engines import selection
from memlog.tracer.event_log import EventLog

DEFAULT_MAX_EVENTS = 100_000


def may_open() -> bool:
    """Whether a window that no ``with`` of the user's encloses may open on this thread.

    A dispatch mode that is put in and taken out in hooks does not nest with the user's own, so such a window
    opens only where there is none; nor inside a graph that is being compiled, a backward pass or a
    transformation of ``torch.func``, below which tensors have no storage of their own.
    """
    if torch.compiler.is_compiling() or torch_private.backward_task() != torch_private.NO_TASK:
        return False
    if torch_private.transforming():
        return False
    if torch_private.missing(torch_private.DISPATCH_NEEDS):
        return True  # the sampler will run, which has no mode
    return not torch_private.mode_stack()


class TraceWindow:
    """Traces from `start` to `stop`, which may stand in hooks.

    Args:
        model: A ``torch.nn.Module``; ``None``: the first module that is called is taken for it.
        others: Further modules that no module calls; those that are not named are found as they are called.
        optimizers: Whose state is there as it begins; those that are not named are found as they step.
        device: As torch writes it; ``None``: where the model is.
        engine: ``"auto"``, or the name of an engine.
        max_events: Events that are kept one by one.
        readings: Whether the allocator's statistics are read at every change of layer (on a GPU).
        diagnostics: Where errors inside the tracer are counted.
        types: Whether it is found out what each storage would hold under autocast, for `memlog advise`.
            It makes tracing about a fifth dearer.
        most_events: Events after which the window gives up: it records no more, and only waits to be closed.

    Attributes:
        torch_device: The device that is traced.
        choice: The engine that runs, and why.

    Raises:
        ConfigurationError: There is no such device, or the engine can't trace it.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        others: Sequence[Any] = (),
        optimizers: Sequence[Any] = (),
        device: str | None = None,
        engine: EngineChoice = "auto",
        max_events: int = DEFAULT_MAX_EVENTS,
        readings: bool = True,
        diagnostics: Diagnostics | None = None,
        types: bool = False,
        most_events: int | None = None,
    ) -> None:
        self.health = diagnostics if diagnostics is not None else Diagnostics()
        models = [module for module in (model, *others) if module is not None]
        self.torch_device = selection.device_of(models, device)
        self._compiled = selection.are_compiled(models)
        self.choice = selection.choose(self.torch_device, engine, compiled=self._compiled)
        self._names = ModuleNames(model, others)
        self._books = Accountant(by_readings=self.choice.engine == "sampler")
        self._log = EventLog(max_events, self._books)
        self._engine = selection.build(
            self.choice,
            self.torch_device,
            self._log,
            self._names,
            self.health,
            readings=readings,
            types=types,
        )
        self._optimizers = optimizers
        self._most_events = most_events
        if most_events is not None:
            self._log.on_overflow(most_events, self._engine.give_up)
        self._trace: RecordedTrace | None = None

    def tops(self) -> list[Any]:
        """The modules that no module calls, so far, in the order in which they became known."""
        return [
            module for module in (top.module() for top in self._names.tops) if module is not None
        ]

    def start(self) -> None:
        """Opens the window, on this thread."""
        self._log.begin()
        try:
            self._engine.start(self._optimizers)
            self._optimizers = ()
        except BaseException:
            self._engine.stop()
            raise

    @property
    def overflowed(self) -> bool:
        """Whether there were so many events that it gave up."""
        return self._most_events is not None and self._log.events >= self._most_events

    def module_begins(self, module: Any, args: Any) -> None:
        """The window was opened in a hook that torch called as this module's ``forward`` began.

        The hooks that `start` put in are not called for it: torch has made its list already.
        """
        with self.health.contained("noticing that a module begins"):
            self._engine.module_begins(module, args)

    def stop(self) -> RecordedTrace:
        """Closes the window and analyses it. Calling it again gives the same trace.

        Every hook is out afterwards; whether the dispatch mode is, `leave` tells.
        """
        if self._trace is None:
            duration_ns = self._log.now()
            finding = self._engine.stop()
            events, kept = self._log.close()
            facts = TraceFacts(
                engine=self.choice.engine,
                why=self.choice.why,
                device=str(self.torch_device),
                exactness=finding.exactness(self.choice.exactness),
                started_us=self._log.began_us,
                duration_ns=duration_ns,
                events=self._log.events,
                kept_events=kept,
                dropped=self._dropped(finding.dropped),
                unseen=self._unseen(finding.unseen),
                fragmentation=finding.fragmentation,
                fragmentation_reason=finding.fragmentation_reason,
                lines=finding.lines,
            )
            paths = tuple(self._names.paths)
            result = build(self._books, paths, facts)
            self._trace = RecordedTrace(
                result,
                paths,
                events,
                kinds=tuple(self._names.kinds),
                optimizers=tuple(self._names.optimizers),
                lines=finding.lines,
            )
        return self._trace

    def abandon(self) -> None:
        """Closes the window and lets go of what it has recorded."""
        self._engine.stop()

    def leave(self) -> bool:
        """Takes out what `stop` could not.

        That is where another's dispatch mode lay on top of ours, or the window is another thread's.
        Until then ours lets everything pass.

        Returns:
            Whether nothing of the window is left in torch.
        """
        return self._engine.leave()

    def _dropped(self, dropped: dict[str, int]) -> dict[str, int]:
        counts = dict(dropped)
        if self._names.omitted:
            counts["modules past the limit of names"] = self._names.omitted
        if self._books.unmatched_frees:
            counts["frees of what was not seen allocated"] = self._books.unmatched_frees
        if self.health.faults:
            counts["errors inside the tracer"] = sum(self.health.faults.values())
        return counts

    def _unseen(self, unseen: tuple[str, ...]) -> tuple[str, ...]:
        if self._compiled:
            unseen = ("The model is compiled: there are no layers inside it.", *unseen)
        return unseen
