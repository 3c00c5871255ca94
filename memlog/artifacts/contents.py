"""Reads a file that may come from anywhere: a bounded number of bytes, unpacked where it is gzip."""

from __future__ import annotations

import gzip
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from memlog.errors import UnopenableFileError
from memlog.units import format_bytes

MAX_BYTES = 128 * 1024**2
"""Of a file once it is unpacked: speedscope's page takes seconds for a tenth of it."""

_GZIP = b"\x1f\x8b"


def read_content(path: Path, limit: int = MAX_BYTES) -> bytes:
    """What is in the file, without gzip around it.

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
        content = _unpacked(path, file, limit) if packed else file.read(limit + 1)
    if len(content) > limit:
        raise UnopenableFileError(f"{path} is larger than {format_bytes(limit)}: it is not opened")
    return content


def _unpacked(path: Path, file: BinaryIO, limit: int) -> bytes:
    try:
        with cast("BinaryIO", gzip.GzipFile(fileobj=file)) as unpacked:
            return unpacked.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnopenableFileError(
            f"{path} is damaged ({error}): fetch it again with `memlog pull`"
        ) from error
