"""Whether wandb has given up uploading a run's rows, which it says to its own log alone.

An answer such as 401 or 403 to a single upload ends all further ones: `finish` then ends the run as if all
were well, and the rows stay in wandb's local file.
"""

from __future__ import annotations

from pathlib import Path

_SAYS = "filestream: fatal error"
_MAX_TEXT = 300


def rows_given_up(log: Path) -> str | None:
    """Why wandb's own process gave up uploading rows; ``None`` where it did not.

    Args:
        log: The ``log_internal`` of a run's settings, one JSON object a line.
    """
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if _SAYS in line:
                    return line[line.index(_SAYS) :].strip()[:_MAX_TEXT].rstrip('"}')
    except OSError:  # a log that is not there says nothing
        return None
    return None
