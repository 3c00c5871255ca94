"""Another distribution that owns the import name ``memlog``, which the package index has for another project.

Installed into the same folder, two distributions overwrite each other's files. pip does not refuse that.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from memlog._internal.terminal import say

DISTRIBUTION = "memlog-ml"
_FOLDER = Path(__file__).parents[2]
"""Folder that contains the package."""
_KINDS = (".dist-info", ".egg-info")
_warned = False


def overwriting(folder: Path = _FOLDER) -> str | None:
    """Return a distribution that was installed over this package, such as ``memlog 1.2``; ``None``: none was.

    Only the names in the package's folder are read, because `init` calls this function.
    """
    with suppress(OSError):
        for entry in os.listdir(folder):  # noqa: PTH208 - a path object for each entry would take longer
            name, _, rest = entry.partition("-")
            kind = next((ending for ending in _KINDS if rest.endswith(ending)), None)
            if kind is not None and name.lower() == "memlog":
                return f"{name} {rest.removesuffix(kind).partition('-')[0]}"
    return None


def is_replaced() -> bool:
    """Return True if the module ``memlog`` in this process is another distribution's."""
    return "init" not in dir(sys.modules["memlog"])


def explained(other: str) -> tuple[str, str]:
    """Return what another distribution of the import name means, and the remedy."""
    return (
        f"{other} is installed, too, and has the same import name, so the two overwrite each other's files",
        f"`pip uninstall {other.partition(' ')[0]}` removes it; then install {DISTRIBUTION} again, because "
        "some of its files are gone",
    )


def warn_once() -> None:
    """Print a line if another distribution was installed over this package: once, in the first rank."""
    global _warned  # noqa: PLW0603 - one line a process
    if _warned:
        return
    _warned = True
    other = overwriting()
    if other is None:
        return
    from memlog._internal.processes import rank_position  # noqa: PLC0415 - rarely needed

    if getattr(rank_position(), "rank", 0) == 0:
        say(": ".join(explained(other)))
