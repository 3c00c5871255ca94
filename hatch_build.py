"""Puts the browser libraries that memlog's pages use into the wheel: speedscope and uPlot.

They are fetched through npm's client and compared with pinned hashes. Without npm or a network the wheel is
built all the same; memlog then fetches them when they are first needed.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FETCHER = "memlog/_internal/npm_package.py"


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's configuration: not used
    """Fetches each library into a folder of its own and has it packed from there."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        fetcher = _load(Path(self.root) / FETCHER)
        self._scratch = tempfile.TemporaryDirectory()
        if version == "editable":
            self._cache(fetcher)
            return
        for package in fetcher.PACKAGES:
            folder = Path(self._scratch.name) / package.name
            if self._fetched(
                fetcher, package, lambda package=package, to=folder: package.fetch(to)
            ):
                to = package.installed.relative_to(Path(self.root).resolve())
                build_data["force_include"][str(folder)] = str(to)

    def _cache(self, fetcher: ModuleType) -> None:
        """An editable install uses the user's cache. The report of every run needs uPlot, which is small."""
        self._fetched(fetcher, fetcher.UPLOT, lambda: fetcher.UPLOT.find(self.app.display_info))

    def _fetched(self, fetcher: ModuleType, package: Any, fetch: Any) -> bool:
        try:
            fetch()
        except (fetcher.FetchError, OSError) as error:
            self.app.display_warning(f"memlog: built without {package.name}: {error}")
            return False
        return True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Called when the wheel is there."""
        self._scratch.cleanup()


def _load(path: Path) -> ModuleType:
    """The fetching module by its path: memlog itself can't be imported where a build is isolated."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location("npm_package", path)
    assert spec is not None  # noqa: S101 - a file that is named .py has one
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
