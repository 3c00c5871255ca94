"""Writing a file so that whoever opens it sees all of it or none."""

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
"""The newest that PyTorch's memory page reads."""


def write_json(document: Any, output_path: str | PathLike[str]) -> Path:
    """Writes a document as JSON, compressed where the name ends in ``.gz``.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is no such folder.
        OSError: It can't be written.
    """
    return _write(output_path, lambda file: file.write(msgspec.json.encode(document)))


def write_pickle(document: Any, output_path: str | PathLike[str]) -> Path:
    """Writes a document of plain types as a pickle, compressed where the name ends in ``.gz``.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is no such folder.
        OSError: It can't be written.
    """
    return _write(output_path, lambda file: pickle.dump(document, file, _PICKLE_PROTOCOL))


def write_text(text: str, output_path: str | PathLike[str]) -> Path:
    """Writes text as UTF-8, compressed where the name ends in ``.gz``.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is no such folder.
        OSError: It can't be written.
    """
    return _write(output_path, lambda file: file.write(text.encode("utf-8", "replace")))


def _write(output_path: str | PathLike[str], fill: Callable[[BinaryIO], object]) -> Path:
    path = Path(output_path)
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a file in it")
    with replacing(path.parent, path.name) as file:
        if path.suffix == ".gz":
            # Without name and time, so that equal traces make equal files.
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
                fill(compressed)  # type: ignore[arg-type] # it has the write() that both ways of filling need
        else:
            fill(file)
    return path
