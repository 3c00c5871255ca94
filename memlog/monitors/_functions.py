"""Wrapping of functions of every kind: plain, async, generators, and callable objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeAlias, TypeVar

from memlog.errors import ConfigurationError

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Function that creates the context manager of one call."""

_END = object()
"""Marker that stands for the end of an async generator."""


def within(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` wrapped so that each call runs inside a context manager from ``around``.

    A generator's context lasts from the first item until the generator is exhausted or closed.
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
    return update_wrapper(made, function)


def update_wrapper(wrapper: CallableT, function: Callable[..., Any]) -> CallableT:
    """Give a wrapper the function's name, signature and docstring, as `functools.update_wrapper` does.

    Attributes are copied from functions only. Attributes of an ``nn.Module`` would keep the module's
    parameters alive.
    """
    updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
    functools.update_wrapper(wrapper, function, updated=updated)
    return wrapper


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
                # This loop does what ``yield from`` does, because async generators don't support it.
                item = await _next_or_end(anext(source))
                while item is not _END:
                    thrown = sent = None
                    try:
                        sent = yield item
                    except Exception as error:  # noqa: BLE001 - the wrapped generator handles it
                        thrown = error
                    step = source.asend(sent) if thrown is None else source.athrow(thrown)
                    item = await _next_or_end(step)

    return generate


async def _next_or_end(item: Awaitable[Any]) -> Any:
    try:
        return await item
    except StopAsyncIteration:
        return _END


def require_function(decorator: str, function: Any) -> None:
    """Check that an object can be called; ``decorator`` is the name in the message.

    Raises:
        ConfigurationError: The object can't be called.
    """
    if not callable(function):
        shown = repr(function)[:100]
        hint = f"; put @{decorator} below @classmethod" if isinstance(function, classmethod) else ""
        raise ConfigurationError(
            f"{decorator} watches functions, and {shown} is a {type(function).__name__}: "
            f"pass a function or another object that can be called{hint}"
        )


def body_of(function: Any) -> Any:
    """Return the function that runs when ``function`` is called, such as an object's ``__call__`` method."""
    if isinstance(function, functools.partial):
        return body_of(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__
