"""The dispatch mode: shows somebody the results of operations that may have allocated."""

# PyTorch leaves TorchDispatchMode's methods without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from typing import Any, Final, Protocol

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from memlog._internal import fork
from memlog._internal.diagnostics import Diagnostics
from memlog.tracer import torch_private
from memlog.tracer.engines.cpu import op_workspace
from memlog.tracer.engines.cpu.op_workspace import Workspace
from memlog.tracer.tensor_storages import (
    Storages,
    changed,
    is_sparse,
    is_wrapper,
    storages_in,
    tensors_in,
)

NOTHING: Final = 0
NEW: Final = 1
"""The result has a storage of its own."""
DETACHED: Final = 2
"""The result is a view, which in the backward pass may be a gradient that is taken over uncopied."""
RESIZED: Final = 4
"""The result is an argument, whose storage may have another size now."""
WRITTEN: Final = 8
"""The result is the first argument, a tensor, written to. A sparse one may hold other storages now."""
RESULT: Final = 15
"""The bits that say one of these; the further ones speak of what the operation takes inside itself."""
MEASURED: Final = 16
"""That is measured."""
UNKNOWN: Final = 32
"""Nobody can tell."""
BY_TYPES: Final = 64
"""It takes something inside only where its arguments are of several types, and that is measured."""

_CHANGES = RESIZED | WRITTEN
_STRIDED = torch.strided
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""To look at others may run code of their own."""
_MAX_KINDS = 10_000


class Observer(Protocol):
    """Who is shown them."""

    def operation(
        self, func: Any, kind: int, args: Any, out: Any, inside: Workspace | None
    ) -> None:
        """``func`` has returned ``out`` for ``args``; ``inside``: what it took, where that was measured.

        Of arguments that it has changed ``out`` has the tensors whose storage is another one, or of another
        size, than it was.
        """

    def before_change(self, values: Any) -> None:
        """An operation may put other storages into the tensors in ``values``, or resize those they have."""


class ObservingMode(TorchDispatchMode):
    """Lets every operation pass, and raises nothing of its own into it.

    Args:
        observer: Who is shown results. Its errors are counted and reach nobody.
        diagnostics: Where they are counted.

    Attributes:
        failures: Operations that could not be shown, because of an error in memlog.
    """

    supports_higher_order_operators = True
    """They (``torch.cond``, ``while_loop``, …) refuse to run below a mode that doesn't say so."""

    def __init__(self, observer: Observer, diagnostics: Diagnostics) -> None:
        super().__init__()
        self.failures = 0
        self._observer: Observer | None = observer
        self._diagnostics = diagnostics
        self._inside = False
        self._thread: threading.Thread | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps __torch_dispatch__ so that nothing in it gets compiled, which costs a
        # microsecond an operation; nothing here calls what could be compiled.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays compiled under this mode, in a torch that asks."""
        return True

    def begin(self) -> None:
        """Puts the mode on top of this thread's stack."""
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            torch_private.allow_higher_order_ops(type(self))
        _remove_finished_from_top()
        _flags.acquire()
        self.__enter__()
        self._inside = True
        self._thread = threading.current_thread()

    @property
    def measures(self) -> bool:
        """Whether it measures what operations take inside themselves."""
        return self._observer is not None

    def stop_observing(self) -> None:
        """Shows nothing any more: every operation passes, at next to no cost."""
        self._observer = None

    def leave(self) -> bool:
        """Leaves if it is on top of this thread's stack; lets everything pass until then.

        A mode that is taken out from below another would leave that other one active for good: each pops
        whatever is on top. Each thread has a stack of its own, which no other can reach. Within a backward
        pass the stack is a copy: what is taken out there is back as soon as the pass is over.

        Returns:
            Whether it is out.
        """
        self.stop_observing()
        thread = self._thread
        if torch_private.backward_task() != torch_private.NO_TASK:
            return not self._inside
        if thread is threading.current_thread():
            _remove_finished_from_top()
            gone = not any(mode is self for mode in torch_private.mode_stack())
        else:
            gone = thread is not None and not thread.is_alive()  # its stack went with it
        if gone:
            self._removed_from_stack()  # where another's exit took it out
        return not self._inside

    def remove_from_top(self) -> bool:
        """Leaves, being on top of the stack of its own thread, unless it still has somebody to show to."""
        if not self._inside or self._observer is not None:
            return False
        self.__exit__(None, None, None)
        self._removed_from_stack()
        return True

    def _removed_from_stack(self) -> None:
        if self._inside:
            self._inside = False
            self._thread = None
            _flags.release()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observer = self._observer
        if types and observer is not None and any(map(is_wrapper, types)):
            return NotImplemented  # what wraps tensors comes back with the operations on those
        if observer is None:
            return func(*args, **(kwargs or {}))
        kind = _kinds.get(func)
        if kind is None:
            kind = self._kind_of(func)
        if kind & BY_TYPES:
            kind = self._by_types(kind, args)
        before = None
        if kind & _CHANGES:
            first: Any = args[0] if args else None
            if kind == WRITTEN and type(first) in _TENSORS and first.layout is _STRIDED:
                return func(*args, **kwargs) if kwargs else func(*args)
            kind, before = self._before_change(kind, args, kwargs)
        inside = None
        if kind & MEASURED:
            out, inside = op_workspace.run(func, args, kwargs or {})
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        if kind:
            try:
                shown = out if before is None else changed(out, before)
                observer.operation(func, kind, args, shown, inside)
            except Exception as error:  # noqa: BLE001 - training goes on
                self.failures += 1
                self._diagnostics.fault("recording an operation", error)
        return out

    def _by_types(self, kind: int, args: Any) -> int:
        mixed = False
        with self._diagnostics.contained("looking at an operation's types"):
            mixed = op_workspace.mixes_types(args)
        return kind & ~BY_TYPES | (MEASURED if mixed else 0)

    def _before_change(self, kind: int, args: Any, kwargs: Any) -> tuple[int, Storages | None]:
        """What an operation may change, as it is; what is written to where it is changes no storage."""
        try:
            if args and is_sparse(args[0]):
                kind |= WRITTEN
            elif kind & WRITTEN:
                return kind & ~RESULT, None
            if self._observer is not None:
                self._observer.before_change(tensors_in(kwargs) or args[:1])
                return kind, storages_in((args, kwargs))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("looking at an operation's arguments", error)
        return kind & ~RESULT, None

    def _kind_of(self, func: Any) -> int:
        try:
            kind = kind_of(func)
            if len(_kinds) < _MAX_KINDS:
                _kinds[func] = kind
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("looking at an operation", error)
            return NOTHING
        return kind


class _Flags:
    """Puts right what torch mixes up where modes of several threads overlap.

    It keeps "some mode is active" in variables of the whole process, which each mode sets back to what they
    were when it began. If the first to begin is the first to end, they stay set for good, and the compiler,
    which looks at them, compiles nothing any more.
    """

    _NAMES = (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._before: dict[str, Any] = {}

    def acquire(self) -> None:
        """A mode of ours begins."""
        with self._lock:
            if self._active == 0:
                values = vars(_python_dispatch)
                self._before = {name: values[name] for name in self._NAMES if name in values}
            self._active += 1

    def release(self) -> None:
        """One has ended; with the last, all is as it was before the first."""
        with self._lock:
            self._active -= 1
            if self._active == 0:
                for name, value in self._before.items():
                    setattr(_python_dispatch, name, value)


_flags = _Flags()
fork.renew(_flags, "_lock", threading.Lock)


def _remove_finished_from_top() -> None:
    """Takes out what is on top of this thread's stack and has nobody to show to any more."""
    while stack := torch_private.mode_stack():
        mode = stack[-1]
        if not isinstance(mode, ObservingMode) or not mode.remove_from_top():
            return


_INSIDE = {
    op_workspace.NOTHING_INSIDE: 0,
    op_workspace.MEASURED: MEASURED,
    op_workspace.UNKNOWN: UNKNOWN,
    op_workspace.BY_TYPES: BY_TYPES,
}
_UNMARKED_VIEWS = (
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
)
"""Their results lie on the storage of their argument, which their schemas do not say."""
_kinds: dict[Any, int] = {}


def kind_of(func: Any) -> int:
    """What an operation's result may be, by its schema, and what is known of its inside."""
    return _result_of(func) | _INSIDE[op_workspace.workspace_class(func)]


def _result_of(func: Any) -> int:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == "aten::lift_fresh":
        # Operations of a higher order have no schema. A tensor made of Python numbers is a view by its
        # schema, and yet nobody saw it before.
        return NEW
    if schema.name == "aten::detach":
        return DETACHED
    if schema.name in _UNMARKED_VIEWS:
        return NOTHING
    if any(one.alias_info is None for one in schema.returns):
        return NEW
    may_resize = schema.name.startswith(("aten::resize", "aten::_resize", "aten::set_"))
    if may_resize or any(argument.is_out for argument in schema.arguments):
        return RESIZED
    return WRITTEN if _is_written_tensor(schema.arguments[:1]) else NOTHING


def _is_written_tensor(arguments: Any) -> bool:
    return any(
        one.alias_info is not None and one.alias_info.is_write and str(one.type) == "Tensor"
        for one in arguments
    )


def refusal() -> str | None:
    """Why this torch can't serve; ``None`` where it can."""
    lacking = torch_private.missing(torch_private.DISPATCH_NEEDS)
    return f"torch {torch.__version__} lacks {', '.join(lacking)}" if lacking else None
