"""Search wandb's log for rows that wandb gave up uploading. wandb reports them nowhere else.

If the server answers an upload with 401 or 403, for example, wandb makes no further uploads. `finish` then
ends the run without an error, and the rows stay in wandb's local file.
"""

from __future__ import annotations

from pathlib import Path

_FATAL = "filestream: fatal error"
_MAX_TEXT = 300


def rows_given_up(log: Path) -> str | None:
    """Return the reason why wandb's process gave up uploading rows; ``None`` if it did not give up.

    Args:
        log: wandb's log, which is named by ``log_internal`` in a run's settings. Each line is a JSON object.
    """
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if _FATAL in line:
                    return line[line.index(_FATAL) :].strip()[:_MAX_TEXT].rstrip('"}')
    except OSError:  # there is no log, so nothing is known
        return None
    return None
