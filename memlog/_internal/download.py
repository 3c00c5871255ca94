"""Progress of a download if the client reports no progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_POLL = 0.1
"""Seconds between checks of the number of bytes that have arrived."""

_T = TypeVar("_T")


def watched(
    download: Callable[[], _T],
    directory: Path,
    progress: Callable[[int], object],
    on_wait: Callable[[int], object] = lambda _: None,
) -> _T:
    """Run a download in a thread, and report the number of bytes that have arrived.

    The thread is a daemon, so that memlog's command can end even if the tracker no longer answers.

    Args:
        download: Function that downloads into ``directory``. Its result is returned, and its exception is
            raised.
        directory: Folder that contains only this download.
        progress: Function called with the number of bytes that have arrived since the last call.
        on_wait: Function called repeatedly with the number of bytes that have arrived so far. If this
            function raises, `watched` raises the same exception at once. The download is not stopped.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(download())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="memlog-download", daemon=True)
    thread.start()
    reported, alive = 0, True
    while alive:
        thread.join(_POLL)
        alive = thread.is_alive()
        arrived = _size(directory)
        if arrived > reported:
            progress(arrived - reported)
            reported = arrived
        if alive:
            on_wait(reported)
    if errors:
        raise errors[0]
    return results[0]


def _size(directory: Path) -> int:
    """Return the bytes of all files in a folder that is being written."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # noqa: PERF203 - it was renamed meanwhile
            continue
    return total
