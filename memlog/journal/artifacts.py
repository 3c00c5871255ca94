"""Keeping a file in a run's folder, until every tracker has it and after.

A name stands for one file of the run, here and in every tracker: a later one takes its place.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from memlog._internal.safe_files import replacing
from memlog.events import Artifact, now_us
from memlog.journal.runs import RunDirectory

MAX_NAME = 128
"""Characters of a name, or of a kind; W&B takes no more."""

_OWN = (("postmortem.md", "postmortem"), ("worst-step.speedscope.json.gz", "flamegraph"))
"""Name and kind of the files that memlog itself makes, in the helper process: no user's takes their place."""
_MAX_REMEMBERED = 10_000
_CHUNK = 1024**2
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def keep(
    run: RunDirectory, source: Path, name: str | None, kind: str, names: Names | None = None
) -> Artifact:
    """Copies a file into the run's folder, in place of an earlier one of the same name.

    Args:
        run: The run.
        source: The file.
        name: Its name in the run; ``None``: the file's own. Characters other than letters, digits, ``.``,
            ``_`` and ``-`` become ``_``.
        kind: What it is, in one word, such as ``flamegraph``; made safe in the same way.
        names: Keeps apart what the user calls differently; ``None``: names are memlog's own, and distinct.

    Returns:
        The event that tells of it.

    Raises:
        OSError: the file can't be read or the copy not written.
        ValueError: it is no file, or the name is nothing.
    """
    _require_a_file(source)
    wanted = source.name if name is None else name
    safe, safe_kind = (
        (safe_name(wanted), safe_name(kind)) if names is None else names.give(wanted, kind)
    )
    path = f"{run.artifacts.name}/{safe}"
    with source.open("rb") as original, replacing(run.path, path) as copy:
        shutil.copyfileobj(original, copy, _CHUNK)
        size = copy.tell()
    return Artifact(now_us(), safe, safe_kind, path, size)


def _require_a_file(source: Path) -> None:
    """Nobody knows how much there is to read of a device or a pipe, nor whether it ever ends."""
    if source.is_file():
        return
    if source.is_dir():
        raise ValueError("it is a folder: pass an archive of it, such as shutil.make_archive makes")
    if source.exists():
        raise ValueError(
            "it is a device, a pipe or a socket: write what it gives to a file, and pass that"
        )
    raise ValueError(f"{source} is no file")


class Names:
    """Gives each of a run's files a name of its own, however the user's are spelt.

    A name that has to be made safe, or that a file of another kind has, must not take the place of that one:
    what comes later gets its kind in its name, or else a digest of what it was called.
    """

    def __init__(self) -> None:
        self._names = {name: (name, kind) for name, kind in _OWN}
        self._kinds: dict[str, str] = {}

    def give(self, name: str, kind: str) -> tuple[str, str]:
        """The name and the kind under which a file is kept: the same ones for the same two.

        Raises:
            ValueError: nothing is left of the name or the kind, or they are no text.
        """
        for what, text in (("name", name), ("kind", kind)):
            if not isinstance(text, str):
                raise ValueError(  # noqa: TRY004 - as all that is wrong with a name
                    f"its {what} is {text!r}: pass text, such as 'report'"
                )
        safe_kind = self._kind(kind)
        wanted, suffix = safe_name(name), Path(safe_name(name)).suffix[:32]
        stem = wanted.removesuffix(suffix)
        of_its_kind = _fitting(stem, f"-{safe_kind[:64]}{suffix}")
        digest = _fitting(stem, f"-{_digest(name, kind)}{suffix}")
        for given in (wanted, of_its_kind):
            if self._is_free(given, (name, kind)):
                return given, safe_kind
        return digest, safe_kind

    def _is_free(self, given: str, original: tuple[str, str]) -> bool:
        # Some file systems take capital letters for small ones.
        key = given.casefold()
        if len(self._names) < _MAX_REMEMBERED:
            return self._names.setdefault(key, original) == original
        return self._names.get(key) == original

    def _kind(self, kind: str) -> str:
        safe = safe_name(kind)
        held = self._kinds.get(safe)
        if held is None and len(self._kinds) < _MAX_REMEMBERED:
            held = self._kinds[safe] = kind
        return safe if held == kind else _fitting(safe, f"-{_digest(kind)}")


def _digest(*texts: str) -> str:
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.blake2s(joined, digest_size=4).hexdigest()


def _fitting(stem: str, tail: str) -> str:
    return stem[: MAX_NAME - len(tail)] + tail


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


def not_kept(path: object, error: Exception) -> str:
    """One line on a file that was not kept, with what to do."""
    shown = f"{str(path)[:500]!r} is not kept as an artifact"
    if isinstance(error, (ValueError, TypeError)) and "no file" not in str(error):
        return (
            f"{shown}: {error}" if isinstance(error, ValueError) else f"{shown}: pass a file's path"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{shown} ({error.strerror}): pass a file that can be read, and look for room on the disk"
    return f"{shown}: there is no such file; write it before save_artifact, a folder as an archive"


def renamed(artifact: Artifact, name: str, kind: str) -> str | None:
    """One line on a file that is kept by another name or kind than it was given; ``None``: it is not."""
    if (artifact.name, artifact.kind) == (name, kind):
        return None
    return (
        f"artifact {name!r} ({kind!r}) is kept as {artifact.name!r} ({artifact.kind!r}): a name "
        "stands for one file, and has letters, digits, '.', '_' and '-' alone"
    )
