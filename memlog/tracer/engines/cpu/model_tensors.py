"""Classification of the storages of parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from memlog.trace.encoding import BACKWARD, BEFORE, GRADIENT, OPTIMIZER_STATE, OUTSIDE, PARAMETER
from memlog.tracer import torch_private
from memlog.tracer.attribution.module_names import ModuleNames
from memlog.tracer.attribution.parameter_owners import ParameterOwners
from memlog.tracer.engines.cpu.live_storages import LiveStorages
from memlog.tracer.engines.wrappers import bucket_sizes
from memlog.tracer.tensor_storages import optimizer_tensors, parameters_of


class ModelTensors:
    """Classification of the storages that belong to models and optimizers.

    Attributes:
        late_gradients: True if the tracer missed the operation that made a gradient.
        bucket_sizes: Bytes of the buffers for communication.
    """

    def __init__(self, names: ModuleNames, live_storages: LiveStorages) -> None:
        self.late_gradients = False
        self.bucket_sizes: list[int] = []
        self._names = names
        self._owners = ParameterOwners(names)
        self._live_storages = live_storages
        self._stepped = weakref.WeakSet[Any]()

    def find_buckets(self) -> None:
        """Find the sizes of the buffers for communication. Within a backward pass, this never returns."""
        self.bucket_sizes = bucket_sizes(root.module() for root in self._names.roots)

    def add_new_roots(self) -> None:
        """Classify the tensors of root modules that were found since the last call."""
        for tensor, layer, category in self._owners.register_new_roots():
            self._live_storages.classify(tensor, layer, category)

    def add_parameters(self) -> None:
        """Classify all parameters and their gradients again at the window's end.

        Parameters of lazy modules did not exist at the window's begin.
        """
        for parameter, layer in self._owners.parameters():
            self._live_storages.classify(parameter, layer, PARAMETER)
            if parameter.grad is not None:
                self._add_gradient(parameter, parameter.grad)

    def add_optimizer(self, optimizer: Any) -> None:
        """Classify an optimizer's parameters, gradients and state."""
        for parameter in parameters_of(optimizer):
            layer = self._owners.of(parameter)
            if layer == OUTSIDE:  # else the parameter was classified with its module
                self._live_storages.classify(parameter, layer, PARAMETER)
            if parameter.grad is not None:
                self._add_gradient(parameter, parameter.grad)
        self.add_state(optimizer)

    def add_state(self, optimizer: Any) -> None:
        for state in optimizer_tensors(optimizer):
            self._live_storages.classify(
                state.tensor, self._owners.of_state(state), OPTIMIZER_STATE
            )

    def repeat_state(self, optimizer: Any) -> None:
        """Write the category of an optimizer's state again. Later calls for the same optimizer do nothing.

        memlog's predictions assign each state tensor to the optimizer step in which the tensor's category was
        last written.
        """
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for state in optimizer_tensors(optimizer):
                self._live_storages.repeat_category(state.tensor, self._owners.of_state(state))

    def add_detached(self, out: Any) -> None:
        """Classify a detached tensor if it becomes a parameter's gradient.

        Autograd detaches a gradient to use the gradient as ``parameter.grad`` without a copy.
        """
        if torch_private.backward_task() == torch_private.NO_TASK:
            return
        parameter = getattr(torch_private.current_node(), "variable", None)
        if parameter is not None and isinstance(out, Tensor):
            self._add_gradient(parameter, out)

    def _add_gradient(self, parameter: Any, gradient: Tensor) -> None:
        """Classify ``gradient``, the gradient of ``parameter``.

        An untracked gradient counts as allocated now if ``parameter`` is in a traced module, else
        as allocated before the trace.
        """
        layer = self._owners.of(parameter)
        phase = BEFORE if layer == OUTSIDE else BACKWARD
        if self._live_storages.classify(gradient, layer, GRADIENT, phase) and phase == BACKWARD:
            self.late_gradients = True
