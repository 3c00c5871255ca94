"""Reading and writing files in an untrusted folder without following a link out of it.

A run's folder may come from another user, or another process may write to it at the same time. A new file is
created under a random name that does not exist yet, and then replaces the old file. Only regular files are
read. Every folder below the root is opened without following links, and the next name is looked up relative
to the open folder. So no path can change between check and use. The path of the root itself may contain
links, because the user named it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for a process at its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_plain(root: Path, name: str) -> BinaryIO:
    """Open a file below ``root`` for reading.

    Raises:
        OSError: the file can't be read, is not a regular file, or a link leads to it.
        ValueError: ``name`` leads out of ``root``.
    """
    with _parent(root, name) as (folder, last):
        return _plain(_opened(last, _READ, folder, root / name), root / name, "rb")


def open_to_append(root: Path, name: str) -> BinaryIO:
    """Open a file below ``root`` to append to it. The file and missing folders are created.

    Raises:
        OSError: the file can't be written, is not a regular file, or a link leads to it.
        ValueError: ``name`` leads out of ``root``.
    """
    with _parent(root, name, make=True) as (folder, last):
        return _plain(_opened(last, _APPEND, folder, root / name), root / name, "ab")


def read_plain(root: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a file below ``root``.

    Raises:
        OSError: The file can't be read, is no regular file, is larger than ``max_bytes``, or a link leads to
            it.
        ValueError: ``name`` leads out of ``root``.
    """
    with open_plain(root, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{root / name} is larger than {max_bytes:,} bytes")
    return content


@contextmanager
def replacing(root: Path, name: str) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the file ``name`` below ``root`` when the block ends without an error.

    Missing folders are created.

    Raises:
        OSError: The new file can't be written, or a folder on its path is a link. The old file is unchanged.
        ValueError: ``name`` leads out of ``root``.
    """
    with _parent(root, name, make=True) as (folder, last):
        unfinished = _unguessable(last)
        descriptor = _opened(unfinished, _NEW, folder, root / name)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
            os.replace(unfinished, last, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            raise


@contextmanager
def beside(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file in the folder of ``path``, and the new file's path; remove the new file afterwards.

    Raises:
        OSError: the file can't be written.
    """
    unfinished = path.with_name(_unguessable(path.name))
    with os.fdopen(os.open(unfinished, _NEW, 0o666), "w+b") as file:
        try:
            yield file, unfinished
        finally:
            unfinished.unlink(missing_ok=True)


def _unguessable(name: str) -> str:
    return f".{name[-64:]}.{os.urandom(8).hex()}.tmp"


@contextmanager
def _parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the open folder that contains ``name``, and the last part of ``name``."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\0" in name:
        raise ValueError(f"{name!r} leads out of {root}")
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            # The next folder is looked up in the open one, so the open one is closed only then.
            below = _opened(part, _FOLDER | os.O_NOFOLLOW, folder, root / part)
            os.close(folder)
            folder = below
        yield folder, parts[-1]
    finally:
        os.close(folder)


def _opened(name: str, flags: int, folder: int, path: Path) -> int:
    try:
        return os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and flags & os.O_DIRECTORY):
            reason = "it is a link, or not a folder: memlog does not follow links here"
        raise type(error)(error.errno, reason, str(path)) from None


def _plain(descriptor: int, path: Path, mode: str) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    file: BinaryIO = os.fdopen(descriptor, mode)  # type: ignore[assignment]  # both modes are binary
    return file
