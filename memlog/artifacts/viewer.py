"""Find speedscope's static build in this install or in the user's cache, or fetch it with npm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memlog._internal.npm_package import SPEEDSCOPE, FetchError, cache_directory
from memlog.errors import ViewerUnavailableError


def find_viewer(announce: Callable[[str], object]) -> Path:
    """Return the folder of speedscope's static build.

    If neither this install nor the user's cache contains the build, npm fetches it. Before that, ``announce``
    is called with one line of text.

    Raises:
        ViewerUnavailableError: The build was not found and can't be fetched. The message says why, and what
            to do.
    """
    try:
        found = SPEEDSCOPE.find(announce)
    except FetchError as error:
        raise ViewerUnavailableError(f"({error}): {error.remedy}") from error
    except OSError as error:
        why = f"({cache_directory()}: {error.strerror or error})"
        raise ViewerUnavailableError(
            f"{why}: set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    assert found is not None  # noqa: S101 - it is fetched if it is missing
    return found
