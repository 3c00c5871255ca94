"""A bound on the memory that reading a file may take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Lets this process take so much more memory at most; what wants more gets a ``MemoryError``.

    Ten bytes of a pickle can ask for 32 GiB, which the unpickler takes before it looks further. The limit
    is the whole process's, so this is for programs of memlog's own. It binds on Linux alone.

    Args:
        more: Bytes of address space beside what there is.
    """
    if sys.platform != "linux":
        yield
        return
    import resource  # noqa: PLC0415 - there is none on other systems

    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bounds = [taken + more, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
