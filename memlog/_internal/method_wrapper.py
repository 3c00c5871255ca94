"""Replacement of a library's method by a function that can call the original method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

Method: TypeAlias = Callable[..., Any]


def wrap_method(owner: type, name: str, around: Method) -> None:
    """Replace a method of a class by ``around``.

    The first argument of ``around`` is the original method; the method's own arguments follow.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapped)
