"""Functions and methods of other packages that memlog replaces while a session runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from memlog._internal.import_hook import ImportWatch, when_imported

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


class Replacements:
    """Replaced functions, and modules whose import is awaited. It is true if a function is replaced."""

    def __init__(self) -> None:
        self._watches: list[ImportWatch] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def when_imported(self, names: Iterable[str], callback: Callable[[Any], object]) -> None:
        """Call back with each module, now or as soon as it is imported. ``callback`` must not raise."""
        watches = [when_imported(name, callback) for name in names]
        self._watches += [watch for watch in watches if watch is not None]

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name), replacement))
        setattr(owner, name, replacement)

    def restore_newest(self, name: str) -> None:
        """Restore the function that was replaced last, if it has this name."""
        if self._replaced and self._replaced[-1][1] == name:
            self._restore(*self._replaced.pop())

    def undo(self) -> None:
        """Restore the functions, unless another package has replaced them later. Await no more imports."""
        for watch in self._watches:
            watch.remove()
        while self._replaced:
            self._restore(*self._replaced.pop())

    def _restore(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        if getattr(owner, name, None) is replacement:
            setattr(owner, name, original)
