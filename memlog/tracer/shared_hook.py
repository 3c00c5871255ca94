"""Base class of hooks, patches and filters that are installed once in a process and shared."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from memlog._internal import processes

_Holder = TypeVar("_Holder")


class SharedHook(Generic[_Holder]):
    """Hook, patch or filter that is installed once in a process, and shared by any number of holders.

    A holder is an object that needs the hook. `_install` runs when the first holder is added, `_uninstall`
    when the last one is removed.

    Attributes:
        holders: Current holders. The tuple is replaced as a whole, so a caller may iterate over it without
            the lock.
    """

    def __init__(self) -> None:
        self.holders: tuple[_Holder, ...] = ()
        self._lock = threading.Lock()
        # A fork can copy the lock while another thread holds it.
        processes.renew(self, "_lock", threading.Lock)

    def add(self, holder: _Holder) -> None:
        with self._lock:
            if not self.holders:
                self._install()
            self.holders = (*self.holders, holder)

    def remove(self, holder: _Holder) -> None:
        """Remove a holder. A second call is harmless."""
        with self._lock:
            if holder not in self.holders:
                return
            self.holders = tuple(other for other in self.holders if other != holder)
            if not self.holders:
                self._uninstall()

    def _install(self) -> None:
        """Install the hook, patch or filter."""

    def _uninstall(self) -> None:
        """Remove the hook, patch or filter."""
