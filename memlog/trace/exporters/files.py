"""Atomic writing of files: a reader sees a whole file or none.

A file whose name ends in ``.gz`` is compressed. Each function raises `ConfigurationError` if the folder does
not exist or the path is a folder, and `OSError` if the file can't be written.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from memlog._internal.safe_files import replacing
from memlog.errors import ConfigurationError

_PICKLE_PROTOCOL = 4
"""Newest pickle protocol that PyTorch's memory page reads."""


def write_json(document: Any, output_path: str | PathLike[str]) -> Path:
    """Write a document as JSON and return the file's path."""
    return _write(output_path, lambda file: file.write(msgspec.json.encode(document)))


def write_pickle(document: Any, output_path: str | PathLike[str]) -> Path:
    """Write a document of plain types as a pickle and return the file's path."""
    return _write(output_path, lambda file: pickle.dump(document, file, _PICKLE_PROTOCOL))


def write_text(text: str, output_path: str | PathLike[str]) -> Path:
    """Write text as UTF-8 and return the file's path."""
    return _write(output_path, lambda file: file.write(text.encode("utf-8", "replace")))


def _write(output_path: str | PathLike[str], fill: Callable[[BinaryIO], object]) -> Path:
    path = Path(output_path)
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"Can't write {path}: there is no folder {path.parent}; create it first"
        )
    if path.is_dir():
        raise ConfigurationError(f"Can't write {path}: it is a folder; name a file in it")
    with replacing(path.parent, path.name) as file:
        if path.suffix == ".gz":
            # No name and no time in the header, so that equal traces make equal files.
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
                fill(compressed)  # type: ignore[arg-type] # it has write(), which is all that `fill` needs
        else:
            fill(file)
    return path
