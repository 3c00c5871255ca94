"""Read an untrusted file up to a maximum size, and decompress the file if it is gzip."""

from __future__ import annotations

import gzip
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from memlog._internal.terminal import format_bytes
from memlog.errors import UnopenableFileError

MAX_BYTES = 128 * 1024**2
"""Maximum decompressed bytes of a file. Speedscope's page already needs seconds to load a file of a tenth of
this size."""
MAX_PICKLE = 512 * 1024**2
"""Maximum decompressed bytes of a pickle. Speedscope's page loads not the pickle, but a flame graph that
memlog makes. So a pickle may be larger than other files. Reading a pickle usually takes ten times as much
memory as the pickle has bytes, and at most forty times as much."""

PICKLE = b"\x80"
"""First byte of a pickle, from protocol 2 on."""

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""First bytes of a text that some editors on Windows saved. No format of JSON has them."""


def read_content(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzip.

    After decompression, a pickle may have up to `MAX_PICKLE` bytes. Any other file may have up to `MAX_BYTES`
    bytes. The file's content tells its kind; the file's name is ignored.

    Raises:
        UnopenableFileError: The file is no plain file, is too large, or is damaged gzip.
        OSError: The file can't be read.
    """
    # Reading a pipe may block, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnopenableFileError(f"{path} is no file: pass the path of a file")
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        content, limit = _unpacked(path, file) if packed else _read(file)
    if len(content) > limit:
        raise UnopenableFileError(f"{path} is larger than {format_bytes(limit)}: it is not opened")
    return content.removeprefix(_BYTE_ORDER_MARK)


def _read(file: BinaryIO) -> tuple[bytes, int]:
    head = file.read(len(PICKLE))
    limit = MAX_PICKLE if head == PICKLE else MAX_BYTES
    # One byte more than the limit, so that the caller can detect a larger file.
    return head + file.read(limit + 1 - len(head)), limit


def _unpacked(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    try:
        with cast("BinaryIO", gzip.GzipFile(fileobj=file)) as unpacked:
            return _read(unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnopenableFileError(
            f"{path} is damaged ({error}): fetch it again with `memlog pull`"
        ) from error
