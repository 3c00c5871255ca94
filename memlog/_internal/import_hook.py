"""A callback after the import of a module.

This file imports nothing but ``sys``: `memlog/launch/site/sitecustomize.py` loads it at the start of every
Python process, and each import, even ``__future__``, would delay that start.
"""

import sys

TYPE_CHECKING = False  # the name from typing, whose import takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class ImportWatch:
    """A finder on ``sys.meta_path`` that calls back once, right after a module has been imported.

    Args:
        names: Full names of modules. The first import of one of these modules triggers the callback.
        callback: Function called with the module. It must not raise, because the exception would reach the
            user's ``import``.
    """

    def __init__(self, *names: str, callback: "Callable[[ModuleType], object]") -> None:
        self._names = names
        self._callback = callback
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return a watched module's spec, whose loader calls the callback; ``None`` for other modules."""
        if fullname not in self._names:
            return None
        # The other finders find the module. This one only wraps the loader of their spec.
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _CallbackLoader(spec.loader, self._loaded)
                    spec.loader = loader
                return spec
        return None

    def _loaded(self, module: "ModuleType") -> None:
        # Not in find_spec(): code that only checks if a module is installed calls find_spec(), too.
        if self in sys.meta_path:
            self.remove()
            self._callback(module)

    def remove(self) -> None:
        """Stop watching. Calling it again is harmless."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(name: str, callback: "Callable[[ModuleType], object]") -> "ImportWatch | None":
    """Call back with a module, now if it is imported. Otherwise return the watch that will do so."""
    module = sys.modules.get(name)
    if module is None:
        return ImportWatch(name, callback=callback)
    callback(module)
    return None


class _CallbackLoader:
    """Loader that runs a module's own loader, and then calls the callback."""

    def __init__(self, loader: "Any", callback: "Callable[[ModuleType], object]") -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> "Any":
        # Resource readers, get_source and the like come from the module's own loader.
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: "ModuleType") -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
