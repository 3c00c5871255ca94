"""Puts speedscope's static build, which `memlog open` shows flame graphs in, into the wheel.

It is fetched through npm's client and compared with a pinned hash. Without npm or a network the wheel is
built all the same; `memlog open` then fetches it when it is first needed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FETCHER = "memlog/artifacts/speedscope_package.py"
VIEWER = "memlog/artifacts/_speedscope"


class ViewerHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's configuration: not used
    """Fetches the build into a folder of its own and has it packed from there."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; an editable install has the user's cache instead."""
        if version == "editable":
            return
        fetcher = _load(Path(self.root) / FETCHER)
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name) / "speedscope"
        try:
            fetcher.fetch(folder)
        except (fetcher.FetchError, OSError) as error:
            self.app.display_warning(f"memlog: built without speedscope, its viewer: {error}")
            return
        build_data["force_include"][str(folder)] = VIEWER

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Called when the wheel is there."""
        if version != "editable":
            self._scratch.cleanup()


def _load(path: Path) -> ModuleType:
    """The fetching module by its path: memlog itself can't be imported where a build is isolated."""
    spec = importlib.util.spec_from_file_location("speedscope_package", path)
    assert spec is not None  # noqa: S101 - a file that is named .py has one
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
