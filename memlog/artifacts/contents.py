"""Reads a file that may come from anywhere: a bounded number of bytes, unpacked where it is gzip."""

from __future__ import annotations

import gzip
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from memlog._internal.units import format_bytes
from memlog.errors import UnopenableFileError

MAX_BYTES = 128 * 1024**2
"""Of a file once it is unpacked: speedscope's page takes seconds for a tenth of it."""
MAX_PICKLE = 512 * 1024**2
"""Of a pickle: a snapshot's flame graph is a small part of it. Reading it takes ten times the memory, and
at most forty times."""

PICKLE = b"\x80"
"""What a pickle begins with, from its protocol 2 on."""

_GZIP = b"\x1f\x8b"


def read_content(path: Path, limit: int | None = None) -> bytes:
    """What is in the file, without gzip around it.

    Args:
        path: The file.
        limit: Bytes that are read at most; ``None``: as many as its kind needs.

    Raises:
        UnopenableFileError: it is no plain file, too large, or damaged gzip.
        OSError: it can't be read.
    """
    # A pipe would be waited for, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnopenableFileError(f"{path} is no file: name one")
    with path.open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        content, limit = _unpacked(path, file, limit) if packed else _read(file, limit)
    if len(content) > limit:
        raise UnopenableFileError(f"{path} is larger than {format_bytes(limit)}: it is not opened")
    return content


def _read(file: BinaryIO, limit: int | None) -> tuple[bytes, int]:
    """One byte more than the limit, so that what is too large shows; and the limit."""
    head = file.read(len(PICKLE))
    if limit is None:
        limit = MAX_PICKLE if head == PICKLE else MAX_BYTES
    return head + file.read(limit + 1 - len(head)), limit


def _unpacked(path: Path, file: BinaryIO, limit: int | None) -> tuple[bytes, int]:
    try:
        with cast("BinaryIO", gzip.GzipFile(fileobj=file)) as unpacked:
            return _read(unpacked, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnopenableFileError(
            f"{path} is damaged ({error}): fetch it again with `memlog pull`"
        ) from error
