"""Conversion of bytes to MiB, and of bytes and durations to text for people.

Everywhere in memlog "MB" and "MiB" mean 1024² bytes, as in the tools that memlog replaces. Names of metrics
use ``mib``.
"""

from __future__ import annotations

MIB = 1024**2

_MINUTE = 60
_HOUR = 60 * _MINUTE
_STEP = 1024.0
_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def mib(size: int | None) -> float | None:
    """Convert bytes to MiB; ``None`` (unknown) stays ``None``."""
    return None if size is None else size / MIB


def format_bytes(size: float | None) -> str:
    """Return a size as text: ``"1.5 GiB"``, ``"512 B"``, ``"unknown"`` for ``None``."""
    if size is None:
        return "unknown"
    scaled = float(size)
    for suffix in _SUFFIXES:
        if abs(scaled) < _STEP or suffix == _SUFFIXES[-1]:
            break
        scaled /= _STEP
    return f"{scaled:.0f} B" if suffix == "B" else f"{scaled:.1f} {suffix}"


def format_duration(seconds: float | None) -> str:
    """Return a duration as text: ``"8.3 s"``, ``"12 min 5 s"``, ``"3 h 4 min"``, ``"unknown"``."""
    if seconds is None:
        return "unknown"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR:,} h {whole % _HOUR // _MINUTE} min"
