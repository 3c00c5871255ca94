"""Facts of the step that an estimate simulates on fake tensors, which the engine can't measure there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from memlog.tracer.engines.op_workspace import Workspace

MeasureFakes: TypeAlias = "Callable[[Any, Any, Any, Any], Workspace | None]"
"""Function that returns an operation's workspace; ``None``: unknown. The function's arguments are the
operation, the call's positional arguments, the call's keyword arguments and the call's result."""

KnownWorkspace: TypeAlias = "Callable[[Any, Any, Any], Workspace | None]"
"""Function that returns the workspace of an operation that is not measured; ``None``: unknown. Its arguments
are the operation, and the call's positional and keyword arguments."""


class Placement(Protocol):
    """Devices and streams on which an estimate's fake tensors would lie.

    Attributes:
        stream: Number of the stream for which memory is allocated now; 0: the device's usual one.
    """

    stream: int

    def of_storage(self, storage: Any) -> Any:
        """Return the place of a storage. The place may become known later."""

    def of_operation(self) -> Any:
        """Return the place of the buffers of the operation that ran last."""

    def is_elsewhere(self, place: Any) -> bool:
        """Return whether a place is not on the traced device."""


class Libraries(Protocol):
    """Libraries that keep memory."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """Memory that the libraries have taken so far."""

    def take(self, func: Any) -> Sequence[Tensor]:
        """Return the memory that a library takes at a call of the operation ``func``."""


class SimulatedStep:
    """The one object by which an estimate tells the engine about its step. In a real step, all are ``None``.

    The engine can't get this as arguments: between them stand the user's program and torch's dispatcher.

    Attributes:
        stand_in: Function that returns a real tensor's fake tensor, or the tensor itself if there is none. A
            step on fake tensors may also use a real tensor.
        placement: Traces leave out the storages that it does not place on the traced device.
        libraries: Libraries whose memory the traces count.
        measure_fakes: Function that finds the workspace of operations on fake tensors.
        once_a_shape: True to call ``measure_fakes`` once for each combination of shapes, and not for each
            operation.
        known_workspace: Function that finds the workspace of operations of the class
            `memlog.tracer.engines.op_workspace.UNMEASURED`.
    """

    def __init__(self) -> None:
        self.stand_in: Callable[[Tensor], Tensor] | None = None
        self.placement: Placement | None = None
        self.libraries: Libraries | None = None
        self.measure_fakes: MeasureFakes | None = None
        self.once_a_shape = True
        self.known_workspace: KnownWorkspace | None = None

    @contextmanager
    def knowing(self, **facts: Any) -> Iterator[None]:
        """Inside the block, set the attributes named by ``facts``; afterwards they are as before."""
        before = {name: getattr(self, name) for name in facts}
        vars(self).update(facts)
        try:
            yield
        finally:
            vars(self).update(before)

    def kept_by_libraries(self) -> Sequence[Tensor]:
        return () if self.libraries is None else self.libraries.kept

    def taken_by_libraries(self, func: Any) -> Sequence[Tensor]:
        """Return the memory that a library takes at a call of the operation ``func``."""
        return () if self.libraries is None else self.libraries.take(func)


SIMULATED = SimulatedStep()
