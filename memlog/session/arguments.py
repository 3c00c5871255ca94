"""Checks of ``init``'s arguments before they become settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import msgspec

from memlog.errors import ConfigurationError
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
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ConfigurationError(
            f"model={what}: pass the torch.nn.Module that you train, or leave it out"
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
