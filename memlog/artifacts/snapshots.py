"""Read a downloaded snapshot of an allocator without running code that may be hidden in it.

A snapshot's file is a pickle, and a pickle is a program. A snapshot that ``torch.cuda.memory._snapshot()``
returns consists only of dictionaries, lists, tuples, text and numbers. `memlog.artifacts.plain_pickle` reads
nothing else.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from memlog.artifacts import plain_pickle
from memlog.artifacts.contents import GZIP
from memlog.artifacts.snapshot_entries import SnapshotUnpickler
from memlog.errors import SnapshotError, UnsafeSnapshotError
from memlog.trace.exporters import trace_plot, write_text

MAX_SNAPSHOT = 1 << 30
"""Maximum bytes of a snapshot that memlog reads. This is enough for a history of 65,536 entries with stacks.
Such a snapshot has a few hundred million bytes."""


def read_snapshot(path: str | PathLike[str], *, max_bytes: int = MAX_SNAPSHOT) -> dict[str, Any]:
    """Read a snapshot's file.

    Args:
        path: A file that ``torch.cuda.memory._dump_snapshot()`` or memlog wrote, gzip or not.
        max_bytes: Maximum bytes of the file, decompressed. A larger file is not read.

    Returns:
        The snapshot, with the keys ``segments`` and ``device_traces``.

    Raises:
        UnsafeSnapshotError: The file would import something, or contains values that a snapshot never has.
        SnapshotError: The file is no snapshot, can't be read, or is too large.
    """
    return parse_snapshot(_content(Path(path), max_bytes), str(path))


def _content(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > max_bytes:
                raise SnapshotError(_too_large(file, max_bytes))
            content = opened.read(size or max_bytes)  # a pipe has the size 0
        if content.startswith(GZIP):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
                content = unpacked.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise SnapshotError(_too_large(file, max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SnapshotError(f"{file} is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise SnapshotError(f"{file} can't be read: {error.strerror or error}") from None
    return content


def _too_large(file: Path, max_bytes: int) -> str:
    return f"{file} is larger than {max_bytes:,} bytes; raise max_bytes to read it"


def draw_snapshot(path: str | PathLike[str], output_path: str | PathLike[str]) -> Path:
    """Draw a snapshot's history as an HTML page that needs neither the network nor scripts.

    Args:
        path: The snapshot's file.
        output_path: Path of the page.

    Returns:
        The path of the page.

    Raises:
        UnsafeSnapshotError: The file would import something, or contains values that a snapshot never has.
        SnapshotError: The file is no snapshot, can't be read, or is too large.
    """
    unpickler = SnapshotUnpickler(_content(Path(path), MAX_SNAPSHOT))
    snapshot = _checked(unpickler.load, str(path))
    return write_text(trace_plot(snapshot, Path(path).name, unpickler.frames), output_path)


def parse_snapshot(content: bytes, name: str = "the snapshot") -> dict[str, Any]:
    """Return the snapshot that the bytes of a pickle describe. Error messages contain ``name``.

    Raises:
        UnsafeSnapshotError: The pickle would import something, or contains values that a snapshot never has.
        SnapshotError: The content is no pickle of a snapshot.
    """
    return _checked(lambda: plain_pickle.loads(content), name)


def _checked(load: Callable[[], Any], name: str) -> dict[str, Any]:
    try:
        document = load()
    except UnsafeSnapshotError as error:
        raise UnsafeSnapshotError(f"{name}: {error}") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
        raise SnapshotError(
            f"{name} is no pickle of a snapshot ({type(error).__name__}); fetch it again"
        ) from None
    if isinstance(document, list):  # memory_snapshot() gives the list alone
        document = {"segments": document, "device_traces": []}
    keys = ("segments", "device_traces")
    if not isinstance(document, dict) or not all(isinstance(document.get(k), list) for k in keys):
        raise SnapshotError(
            f"{name} has no segments and device_traces; pass a file that _dump_snapshot() wrote"
        )
    return document
