"""Bytes and the text that people write for them.

Everywhere in memlog "MB" and "MiB" mean 1024² bytes, as in the tools that it takes over from; names of
metrics say ``mib``.
"""

from __future__ import annotations

MIB = 1024**2

_STEP = 1024.0
_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def mib(size: int | None) -> float | None:
    """Bytes as MiB; ``None`` (unknown) stays ``None``."""
    return None if size is None else size / MIB


def format_bytes(size: float | None) -> str:
    """A size for a person: ``"1.5 GiB"``, ``"512 B"``, ``"unknown"`` for ``None``."""
    if size is None:
        return "unknown"
    scaled = float(size)
    for suffix in _SUFFIXES:
        if abs(scaled) < _STEP or suffix == _SUFFIXES[-1]:
            break
        scaled /= _STEP
    return f"{scaled:.0f} B" if suffix == "B" else f"{scaled:.1f} {suffix}"
