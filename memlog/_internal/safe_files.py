"""Reading and writing files of a folder that anybody may have made, without following a link out of it.

A run's folder may come from elsewhere, or be written by others at the same time. So a new file is made under
a name that nobody can guess, where nothing is yet, and then takes the place of the old one; and what is read
must be a plain file. Every folder on the way down from the one named is opened as none of a link's, and the
next thing is looked for in what was opened, so that nothing changes between looking and using. The folder
that is named may itself be reached through links: the user named it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Nobody may be at the other end of a pipe: opening it must not wait for that.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_plain(root: Path, name: str) -> BinaryIO:
    """Opens a file below ``root`` for reading.

    Args:
        root: The folder.
        name: A path below it, with ``/``.

    Raises:
        OSError: it can't be read, it is no plain file, or a link leads to it.
        ValueError: the name leads out of the folder.
    """
    with _parent(root, name) as (folder, last):
        return _plain(_opened(last, _READ, folder, root / name), root / name, "rb")


def open_to_append(root: Path, name: str) -> BinaryIO:
    """Opens a file below ``root``, which is made if it is not there, its folder too, to write at its end.

    Raises:
        OSError: it can't be written, it is no plain file, or a link leads to it.
        ValueError: the name leads out of the folder.
    """
    with _parent(root, name, make=True) as (folder, last):
        return _plain(_opened(last, _APPEND, folder, root / name), root / name, "ab")


def read_plain(root: Path, name: str, max_bytes: int) -> bytes:
    """What stands in a file below ``root``.

    Raises:
        OSError: as `open_plain`, or it is larger than ``max_bytes``.
        ValueError: the name leads out of the folder.
    """
    with open_plain(root, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{root / name} is larger than {max_bytes:,} bytes")
    return content


@contextmanager
def replacing(root: Path, name: str) -> Iterator[BinaryIO]:
    """Writes a file below ``root``, which takes its place once all is written; folders are made.

    Raises:
        OSError: it can't be written, or its folder is a link. What was there is as it was.
        ValueError: the name leads out of the folder.
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
    """A new file in ``path``'s folder, and its path, which is gone afterwards.

    Raises:
        OSError: it can't be written.
    """
    unfinished = path.with_name(_unguessable(path.name))
    with os.fdopen(os.open(unfinished, _NEW, 0o666), "w+b") as file:
        try:
            yield file, unfinished
        finally:
            unfinished.unlink(missing_ok=True)


def _unguessable(name: str) -> str:
    return f".{name[-64:]}.{secrets.token_hex(8)}.tmp"


@contextmanager
def _parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder in which ``name`` is to be looked for, and the last part of it."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\0" in name:
        raise ValueError(f"{name!r} leads out of {root}")
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
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
        told = error.strerror
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and flags & os.O_DIRECTORY):
            told = "it is a link, or no folder: what it leads to is left alone"
        raise type(error)(error.errno, told, str(path)) from None


def _plain(descriptor: int, path: Path, mode: str) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    file: BinaryIO = os.fdopen(descriptor, mode)  # type: ignore[assignment]  # both modes are binary
    return file
