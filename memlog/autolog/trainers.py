"""Import of memlog's package for a trainer's library, as soon as the script has imported the library."""

from __future__ import annotations

import sys
from functools import partial

from memlog._internal.diagnostics import warn
from memlog._internal.import_hook import ImportWatch

_PACKAGES = {"transformers.trainer": "memlog_transformers"}
"""memlog's package for each trainer's module, for libraries that do not load memlog's callbacks themselves.
memlog uses no entry points for this, because reading them would take milliseconds at every ``init``."""


class TrainerWatch:
    """Importer of memlog's package for each trainer's library, as soon as the script imports the library."""

    def __init__(self) -> None:
        self._watches: list[ImportWatch] = []
        for module, package in _PACKAGES.items():
            if module in sys.modules:
                _load(package)
            else:
                self._watches.append(ImportWatch(module, callback=partial(_load, package)))

    def remove(self) -> None:
        """Stop watching. Calling it again has no effect."""
        for watch in self._watches:
            watch.remove()


def _load(package: str, _module: object = None) -> None:
    try:
        __import__(package)
    except Exception as error:  # noqa: BLE001 - the script's own import must not fail
        warn(
            f"memlog: {package} can't be imported, and memlog counts optimizer steps instead ({error!r})"
        )
