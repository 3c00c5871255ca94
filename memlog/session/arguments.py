"""What ``init`` was given, before it is settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import msgspec

from memlog.errors import ConfigurationError
from memlog.settings import LONGEST_WAIT, Settings
from memlog.sink import LOCAL, Sink

BackendArgument = str | Sink | Sequence[str | Sink] | None


def split_backends(backend: BackendArgument) -> tuple[tuple[str, ...], list[Sink]]:
    """The backends that were named, and the sinks that were given as objects.

    Raises:
        ConfigurationError: one of them is neither.
    """
    several = isinstance(backend, (list, tuple))
    given: list[Any] = list(backend) if several else [] if backend is None else [backend]  # type: ignore[arg-type]
    names = tuple(item for item in given if isinstance(item, str))
    # One that was given twice is one: two uploaders would deliver everything twice.
    sinks = list({id(item): item for item in given if isinstance(item, Sink)}.values())
    for item in given:
        if not isinstance(item, (str, Sink)):
            raise ConfigurationError(
                f"backend {item!r} is a {type(item).__name__}: pass a name such as 'mlflow', a Sink, or "
                "a list of them"
            )
    return names or ((LOCAL,) if sinks else ()), sinks


def require_model(given: Any) -> None:
    """Refuses what is no model.

    Raises:
        ConfigurationError: it has no parameters, or is a class.
    """
    parameters = getattr(given, "parameters", None)
    if given is not None and (isinstance(given, type) or not callable(parameters)):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ConfigurationError(
            f"model={what}: pass the torch.nn.Module that you train, or leave it out"
        )


def require_wait(timeout: object) -> None:
    """Refuses what nobody can wait for; ``None`` is no wait that was given.

    Raises:
        ConfigurationError: it is no number of seconds, or too large a one.
    """
    if timeout is None or (isinstance(timeout, Real) and 0 <= float(timeout) <= LONGEST_WAIT):
        return
    raise ConfigurationError(
        f"timeout={timeout!r}: pass a number of seconds, 0 to {LONGEST_WAIT:,.0f}"
    )


def folder(given: str | os.PathLike[str] | None) -> str | None:
    """The path of a folder as text.

    Raises:
        ConfigurationError: it is no path.
    """
    try:
        return None if given is None else os.fspath(given)
    except TypeError as error:
        raise ConfigurationError(f"dir={given!r}: pass the path of a folder") from error


def passed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that differ from their defaults: the others leave room for ``config``."""
    fields = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    return {
        name: value
        for name, value in arguments.items()
        if (value is not None if name == "directory" else value != fields[name])
    }
