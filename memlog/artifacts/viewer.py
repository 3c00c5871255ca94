"""Find speedscope's static build: in this install, in the user's cache, or with npm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from memlog.artifacts import speedscope_package
from memlog.artifacts.speedscope_package import VERSION, FetchError, is_complete
from memlog.errors import ViewerUnavailableError

INSTALLED = Path(__file__).with_name("_speedscope")
"""Folder of the build in memlog's wheel."""


def find_viewer(announce: Callable[[str], object]) -> Path:
    """Return the folder of speedscope's static build; fetch it if this install does not contain it.

    Args:
        announce: Called with one line before something is fetched.

    Raises:
        ViewerUnavailableError: The build was not found and can't be fetched. The message says why, and what
            to do.
    """
    if is_complete(INSTALLED):
        return INSTALLED
    cached = cache_directory() / f"speedscope-{VERSION}"
    if is_complete(cached):
        return cached
    if speedscope_package.find_npm() is not None:
        announce(f"fetching speedscope {VERSION} with npm into {cached.parent}, once")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        speedscope_package.fetch(cached)
    except FetchError as error:
        raise ViewerUnavailableError(f"({error}): {error.remedy}") from error
    except OSError as error:
        why = f"({cached.parent}: {error.strerror or error})"
        raise ViewerUnavailableError(
            f"{why}: set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return cached


def cache_directory() -> Path:
    """Return memlog's folder in the user's cache, by the XDG base directory specification."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    root = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return root / "memlog"
