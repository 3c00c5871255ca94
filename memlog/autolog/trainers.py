"""Import of ``memlog_transformers`` as soon as the script has imported Transformers' ``Trainer``.

Other libraries with trainers load memlog's callback themselves, or the script passes the callback. memlog
uses no entry points for this, because reading them would take milliseconds at every ``init``.
"""

from __future__ import annotations

from memlog._internal.diagnostics import warn

TRAINER = "transformers.trainer"
_PACKAGE = "memlog_transformers"


def load_package(_module: object) -> None:
    """Import ``memlog_transformers``. Never raises, because the script's own import must not fail."""
    try:
        __import__(_PACKAGE)
    except Exception as error:  # noqa: BLE001 - see above
        warn(
            f"memlog: {_PACKAGE} can't be imported ({error!r}), so memlog counts optimizer steps, not the "
            "Trainer's steps: update memlog and transformers"
        )
