"""Dispatch mode that reports to an observer the results of operations that may have allocated memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any, Final, Protocol

import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.torchside import internals
from memlog.torchside.internals import TorchDispatchMode
from memlog.torchside.tensors import DisableTorchFunction, has_kernel
from memlog.tracer.engines import op_workspace
from memlog.tracer.engines.op_workspace import BY_TYPES, MEASURED, UNMEASURED, Workspace
from memlog.tracer.shared_hook import SharedHook
from memlog.tracer.tensor_storages import (
    PLAIN_CLASSES,
    Storages,
    changed,
    is_sparse,
    is_wrapper,
    storages_in,
    tensors_in,
)

# PyTorch leaves TorchDispatchMode's methods without types.
# mypy: allow-untyped-calls


# Ints, because the flags of each operation are tested: 0.1 µs, but 2 µs with `enum.IntFlag` (Python 3.11).
NOTHING: Final = 0
NEW: Final = 1
"""Flag of an operation whose result has a storage of its own."""
DETACHED: Final = 2
"""Flag of ``detach``, whose result is a view. In the backward pass, the result may be a gradient that
autograd uses without a copy."""
COPIED: Final = 3
"""Value for an operation whose result is a view or a copy, such as ``contiguous``. Autograd splits it into
others before a mode sees it, but not in inference mode or inside a tensor subclass."""
RESIZED: Final = 4
"""Flag of an operation that returns an argument and may resize this argument's storage."""
WRITTEN: Final = 8
"""Flag of an operation that writes to its first argument and returns it. A sparse argument may then have new
storages."""
RESULT: Final = 15
"""Mask of the flags above. Higher bits are the class of the operation's workspace (`op_workspace`)."""

_CALL: Final = 8e-6
"""Seconds that torch takes, beside the mode's own code, to call a mode for one operation."""
_CHANGES = RESIZED | WRITTEN
_INSIDE = MEASURED | UNMEASURED
_STRIDED = torch.strided
_DEVICE = torch.ops.prim.device.default


class Observer(Protocol):
    def operation(
        self, func: Any, kind: int, args: Any, out: Any, inside: Workspace | None
    ) -> None:
        """Record an operation: ``func`` was called with ``args``, and returned ``out``.

        If the operation may replace or resize storages, ``out`` has only the tensors with new or resized
        storages.

        ``kind``: Number from `kind_of`. ``inside``: Workspace of the operation; ``None`` if not measured.
        """

    def before_change(self, values: Any) -> None:
        """Prepare for an operation that may replace or resize the storages of the tensors in ``values``."""


class ObservingMode(TorchDispatchMode):
    """Mode that runs every operation unchanged, and reports it to an observer.

    The observer's errors are counted and never raised.

    ``took``: Function that gets the seconds by which the mode has prolonged an operation.

    Attributes:
        failures: Operations that were not recorded because of an error in memlog.
    """

    supports_higher_order_operators = True
    """Flag for torch. Without it, higher-order operations (``torch.cond``, ``while_loop``) refuse to run
    while the mode is active."""

    def __init__(
        self,
        observer: Observer,
        diagnostics: Diagnostics,
        took: Callable[[float], object] = float,
    ) -> None:
        super().__init__()
        self._took = took
        self.failures = 0
        self._observer: Observer | None = observer
        self._diagnostics = diagnostics
        self._thread: threading.Thread | None = None
        """Thread on whose stack the mode is; ``None`` if the mode is on no stack."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, torch wraps __torch_dispatch__ so that nothing in it is compiled. That costs a
        # microsecond per operation (see `UncompiledMode`).
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled under this mode. Older torch does not call this."""
        return True

    def begin(self) -> None:
        """Put the mode on top of this thread's stack."""
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            internals.allow_higher_order_ops(type(self))
        _remove_finished_from_top()
        _flags.add(self)
        # The thread is set before the mode is entered, because Ctrl-C may come between the two lines.
        self._thread = threading.current_thread()
        self.__enter__()

    @property
    def measures(self) -> bool:
        """True if the mode measures workspaces."""
        return self._observer is not None

    def stop_observing(self) -> None:
        """Stop calling the observer. Operations then pass through with almost no cost."""
        self._observer = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Report nothing inside the block."""
        observer, self._observer = self._observer, None
        try:
            yield
        finally:
            self._observer = observer

    def leave(self) -> bool:
        """Stop observing, and remove the mode if it is on top of this thread's stack.

        Return True if the mode is on no stack now. A mode that stays runs every operation unchanged. The mode
        stays if another mode is above it, or if it is on the stack of another live thread. The mode also
        stays during a backward pass, because autograd would put the mode back after the pass, and during a
        call of compiled code: torch would look for the mode after it, and fail.
        """
        self.stop_observing()
        thread = self._thread
        if internals.backward_task() != internals.NO_TASK or internals.in_compiled_call():
            return thread is None
        if thread is threading.current_thread():
            _remove_finished_from_top()
            removed = not any(mode is self for mode in internals.mode_stack())
        else:
            removed = thread is not None and not thread.is_alive()  # its stack is freed with it
        if removed:
            self._removed_from_stack()  # also if another mode's exit removed it
        return self._thread is None

    def remove_from_top(self) -> bool:
        """Remove the mode from the top of its thread's stack, if the mode has no observer.

        Return whether the mode was removed.
        """
        if self._thread is None or self._observer is not None:
            return False
        self.__exit__(None, None, None)
        self._removed_from_stack()
        return True

    def _removed_from_stack(self) -> None:
        self._thread = None
        _flags.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observer = self._observer
        if types and observer is not None and any(map(is_wrapper, types)):
            return NotImplemented  # the wrapper then calls operations on its inner tensors
        if observer is None:
            return func(*args, **(kwargs or {}))
        began = thread_time()
        kind = _kinds.get(func)
        if kind is None:
            kind = self._kind_of(func)
        if kind & BY_TYPES:
            kind = self._by_types(kind, args)
        before = None
        if kind & _CHANGES:
            first: Any = args[0] if args else None
            # Writing to a dense tensor can't change its storage.
            if kind == WRITTEN and type(first) in PLAIN_CLASSES and first.layout is _STRIDED:
                self._took(thread_time() - began + _CALL)
                return func(*args, **kwargs) if kwargs else func(*args)
            kind, before = self._before_change(kind, args, kwargs)
        inside = None
        if kind & _INSIDE:
            run = op_workspace.run if kind & MEASURED else op_workspace.run_unmeasured
            out, inside, seconds = run(func, args, kwargs or {})
        else:
            called = thread_time()
            out = func(*args, **kwargs) if kwargs else func(*args)
            seconds = thread_time() - called
        if kind:
            try:
                shown = out if before is None else changed(out, before)
                observer.operation(func, kind, args, shown, inside)
            except Exception as error:  # noqa: BLE001 - training goes on
                self.failures += 1
                self._diagnostics.fault("recording an operation", error)
        self._took(thread_time() - began - seconds + _CALL)
        return out

    def _by_types(self, kind: int, args: Any) -> int:
        mixed = False
        try:
            mixed = op_workspace.mixes_types(args)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._diagnostics.fault("looking at an operation's types", error)
        return kind & ~BY_TYPES | (MEASURED if mixed else 0)

    def _before_change(self, kind: int, args: Any, kwargs: Any) -> tuple[int, Storages | None]:
        """Return an operation's kind (see `kind_of`), and the storages of the operation's arguments.

        If the operation can't replace or resize storages, return ``None`` in place of storages. The returned
        kind then has no flags of `RESULT`.
        """
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
        kind = NOTHING
        with self._diagnostics.contained("looking at an operation"):
            kind = _kinds[func] = kind_of(func)
        return kind


class UncompiledMode(ObservingMode):
    """The mode for programs that use ``torch.compile``.

    torch compiles every frame that it reaches while it calls a compiled module, that of a mode too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class FakesMode(ObservingMode):
    """The mode for estimates, in which modes of torch's functions follow the program's calls.

    Those modes need not see what runs inside an operation, such as what the observer reads of tensors: that
    takes more time than the operations on fake tensors.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            if func is _DEVICE and not any(map(is_wrapper, types)):
                return func(*args)  # autograd asks for it several times for each operation
            return super().__torch_dispatch__(func, types, args, kwargs)


class _Flags(SharedHook[ObservingMode]):
    """Reset of torch's global mode flags after the last mode has ended.

    torch sets the flags while a mode is active. If modes of several threads overlap in time, torch can leave
    the flags set after all modes have ended. While the flags are set, the compiler compiles nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Any] = {}

    def _install(self) -> None:
        self._before = internals.dispatch_flags()

    def _uninstall(self) -> None:
        internals.set_dispatch_flags(self._before)


_flags = _Flags()


def _remove_finished_from_top() -> None:
    while stack := internals.mode_stack():
        mode = stack[-1]
        if not isinstance(mode, ObservingMode) or not mode.remove_from_top():
            return


_UNMARKED_VIEWS = (
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
)
"""Operations whose results share the storage of an argument, although the schemas do not say so."""
_kinds: dict[Any, int] = {}


def was_seen(func: Any) -> bool:
    """Return whether a mode of this process has observed an operation."""
    return func in _kinds


def kind_of(func: Any) -> int:
    """Return one number: an operation's flags, such as `NEW`, plus its class from `op_workspace`."""
    return _result_of(func) | op_workspace.workspace_class(func)


def _result_of(func: Any) -> int:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name == "aten::lift_fresh":
        # Higher-order operations have no schema. lift_fresh returns a view of a tensor that torch just made
        # from Python numbers. The storage of this tensor is new.
        return NEW
    if schema.name == "aten::detach":
        return DETACHED
    if schema.name in _UNMARKED_VIEWS:
        return NOTHING
    if any(returned.alias_info is None for returned in schema.returns):
        return NEW
    may_resize = schema.name.startswith(("aten::resize", "aten::_resize", "aten::set_"))
    if may_resize or any(argument.is_out for argument in schema.arguments):
        return RESIZED
    written = any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.type) == "Tensor"
        for argument in schema.arguments[:1]
    )
    return WRITTEN if written else _result_of_view(func)


def _result_of_view(func: Any) -> int:
    composite = func._schema.returns and has_kernel(func.name(), "CompositeImplicitAutograd")
    return COPIED if composite else NOTHING


def leaves_code_compiled() -> bool:
    """Return whether compiled code stays compiled while the mode is active. Not so in older torch."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def refusal() -> str | None:
    """Return the reason why this torch can't run the engine; ``None`` if it can."""
    lacking = internals.missing()
    return f"torch {torch.__version__} lacks {', '.join(lacking)}" if lacking else None
