"""Hearing that a module has been imported.

Needs nothing but the interpreter: `memlog/launch/site/sitecustomize.py` loads this file by itself, at the
start of every Python process, so what it imported would be paid there, ``__future__`` included.
"""

import sys

TYPE_CHECKING = False  # as typing has it, whose import takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class ImportWatch:
    """A finder on ``sys.meta_path`` that calls back once, right after a module has been imported.

    Args:
        names: The module's full name; of several the one that is imported first.
        callback: Gets the module. What it raises would reach whoever imports: it must not.
    """

    def __init__(self, *names: str, callback: "Callable[[ModuleType], object]") -> None:
        self._names = names
        self._callback = callback
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """A watched module's own spec, with a loader that calls back; ``None`` for every other."""
        if fullname not in self._names:
            return None
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
        # Not when it is found: whoever only asks whether a module is installed finds it, too.
        if self in sys.meta_path:
            self.remove()
            self._callback(module)

    def remove(self) -> None:
        """Stops watching. Calling it again is harmless."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallbackLoader:
    """A module's own loader, and a call when it is done."""

    def __init__(self, loader: "Any", callback: "Callable[[ModuleType], object]") -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> "Any":
        # Resource readers, get_source and the like are the true loader's.
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """As the true loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: "ModuleType") -> None:
        """As the true loader does; afterwards the module names that one alone."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
