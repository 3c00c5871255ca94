"""A child of ``fork`` never waits for a thread that only its parent has."""

import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import memlog

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

LOCKS = (type(threading.Lock()), type(threading.RLock()))


def holders() -> Iterator[tuple[Any, str]]:
    """Every lock that lives as long as the process: of a module, or of an object that a module holds."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "memlog":
            for value in (module, *vars(module).values()):
                own = value is module or type(value).__module__.startswith("memlog")
                for attribute, held in (getattr(value, "__dict__", {}) if own else {}).items():
                    if isinstance(held, LOCKS):
                        yield value, attribute


@pytest.mark.slow
def test_every_lock_of_the_process_is_free_in_a_child() -> None:
    for found in pkgutil.walk_packages(memlog.__path__, "memlog."):
        if not found.name.endswith("__main__") and ".site." not in found.name:
            importlib.import_module(found.name)
    held, done = threading.Event(), threading.Event()
    locks = list({(id(owner), name): (owner, name) for owner, name in holders()}.values())
    assert len(locks) >= 8
    taken = [getattr(owner, name) for owner, name in locks]

    def hold() -> None:
        for lock in taken:
            lock.acquire()
        held.set()
        done.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        waits = [name for owner, name in locks if not getattr(owner, name).acquire(timeout=0.1)]
        os._exit(len(waits))
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
