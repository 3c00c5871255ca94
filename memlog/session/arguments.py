"""Checks of ``init``'s arguments, and of the labels of blocks, points and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import msgspec

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import without_credentials
from memlog.errors import ConfigurationError
from memlog.events import Phase, Recorded, Scope
from memlog.settings import LONGEST_WAIT, Settings
from memlog.sink import LOCAL, Sink

BackendArgument = str | Sink | Sequence[str | Sink] | None


def split_backends(backend: BackendArgument) -> tuple[tuple[str, ...], list[Sink]]:
    """Split ``init``'s backends into names and `Sink` objects.

    Raises:
        ConfigurationError: A backend is neither a name nor a `Sink`.
    """
    several = isinstance(backend, (list, tuple))
    given: list[Any] = list(backend) if several else [] if backend is None else [backend]  # type: ignore[arg-type]
    names = tuple(item for item in given if isinstance(item, str))
    sinks = [item for item in given if isinstance(item, Sink)]
    for item in given:
        if not isinstance(item, (str, Sink)):
            raise ConfigurationError(
                f"backend {item!r} is a {type(item).__name__}: pass a name such as 'mlflow', a Sink, or "
                "a list of them"
            )
    return names or ((LOCAL,) if sinks else ()), sinks


def require_model(given: Any) -> None:
    """Check that the argument is a model.

    Raises:
        ConfigurationError: The argument has no ``parameters`` method, or it is a class.
    """
    parameters = getattr(given, "parameters", None)
    if given is not None and (isinstance(given, type) or not callable(parameters)):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ConfigurationError(
            f"model={kind}: pass the torch.nn.Module that you train, or leave it out"
        )


def require_wait(timeout: object) -> None:
    """Check that a timeout is a number of seconds in range, or ``None``.

    Raises:
        ConfigurationError: The timeout is not a number, or it is out of range.
    """
    if timeout is None or (isinstance(timeout, Real) and 0 <= float(timeout) <= LONGEST_WAIT):
        return
    raise ConfigurationError(
        f"timeout={timeout!r}: pass a number of seconds, 0 to {LONGEST_WAIT:,.0f}"
    )


def passed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ from their defaults. ``config`` can set the other arguments."""
    fields = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    return {
        name: value
        for name, value in arguments.items()
        if (value is not None if name == "directory" else value != fields[name])
    }


MAX_METRIC_LABELS = 50
"""Maximum number of labels of blocks, points and phases that get metrics of their own."""


shown_label = lru_cache(maxsize=256)(without_credentials)
"""Label without secrets. A program has few labels and uses them often."""


class Labels:
    """Labels of blocks, points and phases. The first `MAX_METRIC_LABELS` labels get metrics of their own."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self._known: set[str] = set()

    def with_step(
        self, event: Scope | Recorded | Phase, step: int | None
    ) -> Scope | Recorded | Phase:
        """Return the event without secrets in its label, and with the step if trackers get metrics for it.

        They get metrics for the first `MAX_METRIC_LABELS` labels, and none for an event without a step.
        """
        event = msgspec.structs.replace(event, label=shown_label(event.label))
        if event.label not in self._known:
            if len(self._known) >= MAX_METRIC_LABELS:
                self._diagnostics.drop(
                    "labels",
                    f"blocks, points and phases have more than {MAX_METRIC_LABELS} labels: trackers get "
                    f"metrics of only the first {MAX_METRIC_LABELS}, the journal has all; use fewer labels",
                )
                return event
            self._known.add(event.label)
        return msgspec.structs.replace(event, step=step)
