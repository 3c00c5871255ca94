"""Shorter timeouts for trackers' clients in a command that the user gave a timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_limit: float | None = None


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Limit every timeout that `limited` returns in this block."""
    global _limit  # noqa: PLW0603 - the one place that holds it
    before, _limit = _limit, seconds
    try:
        yield
    finally:
        _limit = before


def limited(seconds: float) -> float:
    """Return a client's timeout: ``seconds``, or less within `limited_to`."""
    return seconds if _limit is None else min(seconds, _limit)
