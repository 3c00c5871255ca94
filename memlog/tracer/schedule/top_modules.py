"""The modules at the top, which no module calls: those that a session's traces are of."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

_MOST_PARAMETERS = 10_000
"""That are looked at, to find one that is trained."""


class Tops:
    """They are remembered from trace to trace, held weakly.

    Args:
        model: The first, where the user has named one.
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._others: list[weakref.ref[Any]] = []

    def known(self) -> list[Any]:
        """As far as they are known: always in one order, so that names stay."""
        known = [self._model, *(top() for top in self._others)]
        return [module for module in known if module is not None]

    def remember(self, tops: Sequence[Any]) -> None:
        """Modules without parameters are found anew each time, and parts of others are no top."""
        trained = [top for top in tops if next(top.parameters(), None) is not None]
        parts = {id(part) for top in trained for part in top.modules() if part is not top}
        self._others = [
            weakref.ref(top) for top in trained if top is not self._model and id(top) not in parts
        ]

    def train(self, module: Any) -> bool:
        """Whether what is called may begin a training step.

        What has nothing to be trained, such as a transform of the data, does not. Being in the mode of
        evaluation says nothing: with its statistics frozen a model is trained in it.

        Args:
            module: That is called.
        """
        import torch  # noqa: PLC0415 - it is there: a module of it is called

        if not torch.is_grad_enabled():
            return False
        parameters = itertools.chain.from_iterable(
            top.parameters() for top in (self.known() or [module])
        )
        return any(
            parameter.requires_grad for parameter in itertools.islice(parameters, _MOST_PARAMETERS)
        )
