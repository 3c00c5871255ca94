"""Recording of the operations that the dispatch mode sees, of compiled graphs, and of what can't be seen.

A derivative is the function that autograd runs for one operation in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside import internals
from memlog.trace.encoding import BACKWARD, FORWARD, OUTSIDE, WORKSPACE
from memlog.trace.records import UNKNOWN_TYPE
from memlog.tracer.engines import dispatch_mode, op_workspace, patches
from memlog.tracer.engines.autocast_types import AutocastTypes
from memlog.tracer.engines.dispatch_mode import ObservingMode
from memlog.tracer.engines.live_storages import LiveStorages, ModelTensors
from memlog.tracer.engines.op_workspace import Workspace
from memlog.tracer.engines.patches import ModeCopies
from memlog.tracer.engines.simulated_step import SIMULATED
from memlog.tracer.engines.storage_events import AllocationOwner, EventLog
from memlog.tracer.function_patch import AroundPatch
from memlog.tracer.module_stack import CallingLines, ModuleStack, ThreadState
from memlog.tracer.tensor_storages import changed, storages_in, tensors_in

_COLLECTIVES: Final = "c10d"
"""Namespace of collectives that return their arguments, although the schemas do not say so."""
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class OperationRecorder:
    """Observer of a dispatch mode. It tracks the storages of results, and the workspaces of operations.

    Attributes:
        altered: Bytes allocated by each derivative that torch computes in another way during tracing.
        lines: Lines of the program that called operations outside all modules.
        unmeasured: Number of calls of each operation whose workspace could not be measured.
    """

    def __init__(
        self,
        log: EventLog,
        live_storages: LiveStorages,
        module_stack: ModuleStack,
        model_tensors: ModelTensors,
        *,
        fakes: bool,
        types: bool,
    ) -> None:
        self._log = log
        self._live_storages = live_storages
        self._module_stack = module_stack
        self._model_tensors = model_tensors
        self._fakes = fakes
        self._calling_lines = CallingLines()
        self._copies = ModeCopies(live_storages)
        self._autocast_types = AutocastTypes(live_storages) if types else None
        self.altered = self._copies.altered
        self.lines = self._calling_lines.lines
        self.unmeasured: Counter[str] = Counter()

    def owner(self, thread_state: ThreadState) -> AllocationOwner:
        """Return the layer, phase and thread of the current operation. Also set the line of new storages.

        Outside all modules, the line is the program's line that calls the operation. In the backward pass,
        the line is the one that called the forward operation, if known. Within a module, the line is 0.
        """
        layer, phase = self._module_stack.owner(thread_state)
        line = 0
        if layer == OUTSIDE:
            line = thread_state.line if phase == BACKWARD else 0
            line = line or self._calling_lines.current_line()
            if phase == FORWARD:
                self._module_stack.mark_line(line, thread_state)
        self._live_storages.events.line = line
        return AllocationOwner(layer, phase, thread_state.number)

    def before_change(self, values: Any) -> None:
        """Track the storages of an operation's arguments, because the operation may change them."""
        if self._module_stack.thread_state(join=True) is not None:
            for tensor in tensors_in(values):
                self._live_storages.track_existing(tensor)

    def operation(
        self, func: Any, kind: int, args: Any, out: Any, inside: Workspace | None
    ) -> None:
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is None:
            return
        result = kind & dispatch_mode.RESULT
        if getattr(func, "namespace", None) == _COLLECTIVES:
            self._live_storages.communicated(tensors_in(args), self._model_tensors.bucket_sizes)
            result = dispatch_mode.NOTHING
        if result == dispatch_mode.DETACHED:
            self._model_tensors.add_detached(out)
            return
        if result == dispatch_mode.COPIED:
            new = changed(out, storages_in(args))
            result = dispatch_mode.NEW if new else dispatch_mode.NOTHING
            out = new[0] if len(new) == 1 else new
        owner = self.owner(thread_state)
        made = UNKNOWN_TYPE
        before, *between, after = _around_results(inside)
        blocks = self._live_storages.add_workspace(before, owner, made, first=True)
        if result == dispatch_mode.NEW:
            # `lift_fresh` also gets tensors on memory that torch did not allocate.
            if func is not _LIFT_FRESH or not self._live_storages.is_foreign(out.untyped_storage()):
                if inside is not None and inside.order:
                    out = tuple(out[at] for at in inside.order)
                for sizes, result_tensor in zip(between, tensors_in(out), strict=False):
                    self._live_storages.track(result_tensor, owner)
                    blocks = self._live_storages.add_workspace(sizes, owner, made, blocks)
                made = self._track_results(func, args, out, owner, thread_state)
        elif result:
            self._live_storages.track_changed(
                tensors_in(out), owner, written=bool(result & dispatch_mode.WRITTEN)
            )
        self._add_kept(func, owner)
        self._live_storages.add_workspace(after, owner, made, blocks)
        self._count_unmeasured(func, kind, inside)
        self._log.fold_when_full()

    def _add_kept(self, func: Any, owner: AllocationOwner) -> None:
        """Track the memory that a library takes at the operation and keeps."""
        for tensor in SIMULATED.taken_by_libraries(func):
            self._live_storages.classify(tensor, OUTSIDE, WORKSPACE, owner.phase)

    def _count_unmeasured(self, func: Any, kind: int, inside: Workspace | None) -> None:
        measures = kind > dispatch_mode.RESULT and (
            not self._fakes or SIMULATED.measure_fakes is not None
        )
        if measures and (inside is None or not inside.complete):
            self.unmeasured[str(func)] += 1

    def _track_results(
        self, func: Any, args: Any, out: Any, owner: AllocationOwner, thread_state: ThreadState
    ) -> int:
        """Track the results of an operation; return their type under autocast."""
        before = self._live_storages.serial
        instead = self._copies.replaced(func, args, out, owner.phase, thread_state)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._live_storages.track(tensor, owner, instead)
        if self._autocast_types is None:
            return UNKNOWN_TYPE
        return self._autocast_types.operation(func, args, out, owner.layer, owner.phase, before)

    def add_result(self, tensor: Tensor) -> None:
        """Record the result of a derivative that torch computed without the dispatch mode."""
        thread_state = self._module_stack.thread_state(join=True)
        if thread_state is not None:
            self._live_storages.track(tensor, self.owner(thread_state))


def _around_results(inside: Workspace | None) -> list[tuple[int, ...]]:
    """Return a workspace's allocations and frees before the results, between them, and after them."""
    if inside is None:
        return [(), ()]
    if inside.blocks is None:
        size = inside.peak - inside.kept
        return [(), ((size, -size) if size > 0 else ())]
    if op_workspace.RESULTS not in inside.blocks:
        return [(), inside.blocks]
    parts, begin = [], 0
    for at, size in enumerate(inside.blocks):
        if size == op_workspace.RESULTS:
            parts.append(inside.blocks[begin:at])
            begin = at + 1
    return [*parts, inside.blocks[begin:]]


@dataclass(eq=False)
class CompiledCode:
    """Recording of compiled graphs while a window is open.

    Attributes:
        calls: Number of calls of compiled graphs, by the layer that they belong to.
        unknown: Number of calls with allocations that are not known.
    """

    _live_storages: LiveStorages
    _module_stack: ModuleStack
    _mode: ObservingMode
    _owner: Callable[[ThreadState], AllocationOwner]
    _diagnostics: Diagnostics
    _patches: Sequence[AroundPatch] = field(default=(), init=False)
    calls: Counter[int] = field(default_factory=Counter, init=False)
    unknown: int = field(default=0, init=False)
    _compilations: int = field(default=0, init=False)
    _running: bool = field(default=False, init=False)
    _seen: bool = field(default=False, init=False)

    def begin(self) -> None:
        # On fake tensors, no compiled code runs unseen: an estimate makes each buffer by an operation.
        self._seen = internals.fakes_active()
        if self._seen:
            return
        self._patches = patches.compiled_code()
        self._compilations = internals.compilations()
        for patch in self._patches:
            patch.add(self._call)

    def end(self) -> None:
        for patch in self._patches:
            patch.remove(self._call)

    @property
    def may_have_run(self) -> bool:
        """True if compiled code may have run unseen, because code was compiled or loaded in the window."""
        if self._seen:
            return False
        return internals.compilations() != self._compilations or len(patches.compiled_code()) > len(
            self._patches
        )

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread_state = self._module_stack.thread_state(join=True)
        # Compiled code that compiled code calls is a part of it.
        if thread_state is None or self._running:
            return function(*args, **kwargs)
        with self._diagnostics.contained("looking at the inputs of compiled code"):
            self._track_inputs(args)
        out, sizes, returned = None, None, False
        self._running = True
        try:
            with (
                self._mode.paused(),
                self._live_storages.events.held(internals.mark_profile) as frees,
                internals.without_log_warnings(),
            ):
                out, sizes = op_workspace.allocations(function, args, kwargs)
            returned = True
        finally:
            self._running = False
            # Also if the code has raised: the frees of its inputs must be written.
            with self._diagnostics.contained("recording compiled code"):
                owner = self._owner(thread_state)
                self.calls[owner.layer] += 1
                known = self._live_storages.add_compiled(sizes, tensors_in(out), frees, owner)
                self.unknown += not (known and returned)
        return out

    def _track_inputs(self, args: Any) -> None:
        # No frame that is left while the code runs may hold an input: the code frees most of them.
        for tensor in tensors_in(args):
            self._live_storages.track_existing(tensor)


_MOST_NAMES: Final = 8
"""Maximum number of names in a sentence. Further names are left out."""
_NEGLIGIBLE: Final = 0.001
"""If derivatives with a limitation take at most this fraction of the peak, no sentence names them."""

ALWAYS: Final = (
    "Memory that an operation allocates and frees inside itself is measured once for each shape; views, "
    "pointwise operations, copies and fills are assumed to need none.",
    "Copies of a random number generator's state (5 kB each) are seen if torch.get_rng_state makes them, as "
    "checkpointing does, but not if Generator.get_state does.",
    "Memory that is not torch's (numpy, shared memory of a data loader's workers, the interpreter, the "
    "allocator's own fragments) is not seen, unless a parameter or buffer lies on it.",
    "Tensors made before the trace are known only if they belong to the model or an optimizer, or are "
    "arguments of the model.",
    "Tensors made on other threads than the one that began the trace are not seen.",
)
SPARSE: Final = (
    "Pointwise operations on sparse tensors allocate more inside themselves than is measured, so peaks are "
    "lower bounds."
)
COMPLEX: Final = (
    "Operations on complex tensors with a lazy conjugation (torch.conj) first copy them. These copies are "
    "not seen, so peaks are lower bounds."
)
NESTED: Final = (
    "Memory in which nested tensors store their shapes is not seen, so peaks are lower bounds."
)
COMPILED: Final = (
    "Compiled code ran (torch.compile) whose allocations are not all known. They are seen only when torch "
    "operations use them later, so peaks and live bytes at the end are lower bounds."
)
LATE_GRADIENTS: Final = (
    "Some gradients were not made on this thread (perhaps in a backward pass on another one). They count "
    "from when they were first seen, and what was allocated while they were made is unknown."
)
THREADS: Final = (
    "Modules of the model were called on other threads than the one that began the trace. What they allocate "
    "is not seen, so peaks are lower bounds."
)
PRECISION: Final = (
    "The precision of matrix products changed during the trace. It decides what operations allocate inside "
    "themselves, so peaks are lower bounds."
)
UNMEASURED_PREFIX: Final = (
    "The bytes that these operations allocate and free inside themselves are unknown, so peaks are lower "
    "bounds: "
)
"""Beginning of the sentence of `unmeasured`."""
FAILED: Final = (
    "Operations were not recorded because of an error in memlog, so peaks are lower bounds."
)
TRANSFORMED: Final = (
    "Inside a transformation of torch.func (grad, vmap, jvp) all bytes are seen, but its backward pass "
    "counts for the forward pass of the surrounding layer."
)


def compiled(paths: Sequence[str]) -> str:
    """Return the sentence about compiled graphs that were measured. ``paths``: Layers that ran them."""
    names = ", ".join(paths[:_MOST_NAMES]) + (" and more" if len(paths) > _MOST_NAMES else "")
    return (
        "Compiled code ran (torch.compile). The allocator's events have its bytes, and they count for the "
        f"layer that ran it: {names}. Layers inside it, and its line of the program, are unknown."
    )


def unknown_compilers(names: Sequence[str]) -> str:
    """Return the sentence about compilers whose code the engine can't observe."""
    return (
        "Code of these compilers may have run, and what it allocates is unknown, so peaks and live bytes at "
        f"the end are lower bounds: {', '.join(names[:_MOST_NAMES])}."
    )


def altered_derivatives(allocated: Counter[str], peak: int) -> str | None:
    """Return the sentence about derivatives that torch computes in another way during tracing.

    ``allocated``: Bytes of each derivative. If the sum is at most a thousandth of ``peak``, return ``None``.
    """
    names = _names(allocated, peak)
    return names and (
        "During tracing, torch computes these derivatives in another way, so the peak of an untraced "
        f"step may be lower or higher: {names}."
    )


def untraced_derivatives(returned: Counter[str], peak: int) -> str | None:
    """Return the sentence about derivatives that ran without the dispatch mode.

    ``returned``: Bytes of each derivative's results. If the sum is at most a thousandth of ``peak``, return
    ``None``.
    """
    names = _names(returned, peak)
    return names and (
        "Memory that these derivatives allocate and free inside themselves is not seen, because torch would "
        f"compute them in another way if memlog traced inside them: {names}."
    )


def _names(size_of: Counter[str], peak: int) -> str | None:
    """Return the derivatives' names, the largest first; ``None`` if their bytes are negligible."""
    if size_of.total() <= _NEGLIGIBLE * peak:
        return None
    return ", ".join(name for name, _ in size_of.most_common())


def unmeasured(counts: Counter[str]) -> str:
    """Return the sentence about operations whose workspace could not be measured, the most frequent first.

    ``counts``: Number of calls of each operation.
    """
    names = ", ".join(name for name, _ in counts.most_common(_MOST_NAMES))
    more = len(counts) - _MOST_NAMES
    return UNMEASURED_PREFIX + names + (f" and {more} more." if more > 0 else ".")
