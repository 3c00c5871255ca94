"""memlog's integration with Lightning: each trainer automatically gets a `MemlogCallback`.

`callbacks` is an entry point of Lightning and ``pytorch_lightning``. Both call it for each new ``Trainer``,
also in programs that do not use memlog. So importing this package loads neither memlog nor Lightning.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlog_lightning.callback import MemlogCallback

__all__ = ["MemlogCallback", "callbacks"]


def callbacks() -> list[MemlogCallback]:
    """Return the callback for a new ``Trainer``; no callback if memlog records nothing. Never raises."""
    try:
        # Under `memlog run` the session begins when training does, so a trainer always needs the callback.
        if "MEMLOG_LAUNCH" not in os.environ:
            memlog = sys.modules.get("memlog")
            if memlog is None:
                return []
            if memlog.current_session() is None:
                from memlog_lightning import late  # noqa: PLC0415 - only with memlog

                late.watch_fits()
                return []
        return [__getattr__("MemlogCallback")()]
    except Exception:  # noqa: BLE001 - a Trainer must not fail because memlog is installed
        return []


def __getattr__(name: str) -> Any:
    """Load the callback on its first use. Loading it imports Lightning."""
    if name != "MemlogCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memlog_lightning import callback  # noqa: PLC0415 - see the docstring

    return callback.MemlogCallback
