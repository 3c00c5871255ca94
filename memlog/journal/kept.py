"""Keeping a file in a run's folder, until every tracker has it and after."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from memlog.events import Artifact, now_us
from memlog.journal.runs import RunDirectory

MAX_NAME = 128
"""Characters of a name, or of a kind; W&B takes no more."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def keep(run: RunDirectory, source: Path, name: str | None, kind: str) -> Artifact:
    """Copies a file into the run's folder, in place of an earlier one of the same name.

    Args:
        run: The run.
        source: The file.
        name: Its name in the run; ``None``: the file's own. Characters other than letters, digits, ``.``,
            ``_`` and ``-`` become ``_``.
        kind: What it is, in one word, such as ``flamegraph``; made safe in the same way.

    Returns:
        The event that tells of it.

    Raises:
        OSError: the file can't be read or the copy not written.
        ValueError: it is no file, or the name is nothing.
    """
    if not source.is_file():
        raise ValueError(f"{source} is no file")
    safe = safe_name(source.name if name is None else name)
    run.artifacts.mkdir(exist_ok=True)
    target = run.artifacts / safe
    temporary = run.artifacts / f".{safe[-64:]}.{os.getpid()}.tmp"
    try:
        shutil.copyfile(source, temporary)
        size = temporary.stat().st_size
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return Artifact(now_us(), safe, safe_name(kind), f"{run.artifacts.name}/{safe}", size)


def safe_name(text: str) -> str:
    """``text`` as a name that every tracker and file system takes.

    Raises:
        ValueError: nothing is left of it.
    """
    safe = _UNSAFE.sub("_", str(text)).lstrip(".")
    if not safe.strip("_-"):
        raise ValueError(f"{text!r} is no name: use letters, digits, '.', '_' and '-'")
    suffix = Path(safe).suffix[:32]
    return safe if len(safe) <= MAX_NAME else safe[: MAX_NAME - len(suffix)] + suffix
