"""Functions of every kind under a decorator: plain, async, generators, objects that can be called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeAlias

from memlog.errors import ConfigurationError

Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes what a call happens in."""

_OVER = object()
"""In place of an item: there are no more."""


def within(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of whose every call the body runs within what ``around`` makes.

    That of a generator does from its first item until it is exhausted or closed.
    """
    body = body_of(function)
    if inspect.iscoroutinefunction(body):
        made = _awaiting(around, function)
    elif inspect.isgeneratorfunction(body):
        made = _generating(around, function)
    elif inspect.isasyncgenfunction(body):
        made = _generating_async(around, function)
    else:
        made = _calling(around, function)
    # Only a function's own attributes are copied: a module's would keep its parameters alive here.
    updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
    return functools.update_wrapper(made, function, updated=updated)


def _calling(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return call


def _awaiting(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return await function(*args, **kwargs)

    return call


def _generating(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    def generate(*args: Any, **kwargs: Any) -> Any:
        with around():
            return (yield from function(*args, **kwargs))

    return generate


def _generating_async(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with around():
            async with aclosing(function(*args, **kwargs)) as source:
                # What ``yield from`` does, which async generators don't have.
                item = await _or_over(anext(source))
                while item is not _OVER:
                    thrown = sent = None
                    try:
                        sent = yield item
                    except Exception as error:  # noqa: BLE001 - it is the source's to answer
                        thrown = error
                    asked = source.asend(sent) if thrown is None else source.athrow(thrown)
                    item = await _or_over(asked)

    return generate


async def _or_over(item: Awaitable[Any]) -> Any:
    try:
        return await item
    except StopAsyncIteration:
        return _OVER


def require_function(decorator: str, function: Any) -> None:
    """Refuses what can't be called.

    Raises:
        ConfigurationError: it can't.
    """
    if not callable(function):
        shown = repr(function)[:100]
        hint = f"; put @{decorator} below @classmethod" if isinstance(function, classmethod) else ""
        raise ConfigurationError(
            f"{decorator} watches functions, and {shown} is a {type(function).__name__}: "
            f"pass what can be called{hint}"
        )


def body_of(function: Any) -> Any:
    """The function whose body a call runs: of an object that can be called, its class's ``__call__``."""
    if isinstance(function, functools.partial):
        return body_of(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__
