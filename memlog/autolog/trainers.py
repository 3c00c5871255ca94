"""Import of memlog's package for Transformers' Trainer, as soon as the script has imported the Trainer.

Other trainers' libraries load memlog's callbacks themselves, or the script names the callback. memlog uses no
entry points for this, because reading them would take milliseconds at every ``init``.
"""

from __future__ import annotations

from memlog._internal.diagnostics import warn

TRAINER = "transformers.trainer"
_PACKAGE = "memlog_transformers"


def load_package(_module: object) -> None:
    """Import memlog's package. Never raises, because the script's own import must not fail."""
    try:
        __import__(_PACKAGE)
    except Exception as error:  # noqa: BLE001 - see above
        warn(
            f"memlog: {_PACKAGE} can't be imported, and memlog counts optimizer steps instead ({error!r})"
        )
