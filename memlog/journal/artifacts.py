"""Copy a user's file into the run's folder.

In the run's folder and in every tracker, a name belongs to one file. A later file of that name replaces the
earlier file.
"""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from memlog._internal.safe_files import open_plain, read_plain, replacing
from memlog.events import POSTMORTEM_FILE, REPORT_FILE, REPORT_KIND, Artifact, now_us
from memlog.journal.runs import RunDirectory

MAX_NAME = 128
"""Maximum number of characters in a name or a kind. W&B accepts no more."""

_OWN = (
    (POSTMORTEM_FILE, "postmortem"),
    ("worst-step.speedscope.json.gz", "flamegraph"),
    ("worst-step.html", "flamegraph"),
    ("out-of-memory.pickle", "snapshot"),
    ("out-of-memory.html", "snapshot"),
    (REPORT_FILE, REPORT_KIND),
)
"""Name and kind of the files that memlog's helper process writes. A user's file must not replace them."""
_CHUNK = 1024**2
_MOST_TEXT = 1024**2
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def keep(
    run: RunDirectory, source: Path, name: str | None, kind: str, names: Names | None = None
) -> Artifact:
    """Copy a file into the run's folder, and return the event that describes the copy.

    ``name`` is the name of the copy; ``None``: the file's own name. An older copy with this name is replaced.
    ``kind`` is one word for the file's content, such as ``flamegraph``. In ``name`` and ``kind``, characters
    other than letters, digits, ``.``, ``_`` and ``-`` become ``_``. ``names`` keeps the copy from replacing a
    file that was saved with another name or kind; ``None``: the name is memlog's own and already unique.

    Raises:
        OSError: The file can't be read, or the copy can't be written.
        ValueError: ``source`` is no plain file, or no usable character is left of the name or kind.
    """
    _require_a_file(source)
    wanted = source.name if name is None else name
    safe, safe_kind = (
        (safe_name(wanted), safe_name(kind)) if names is None else names.give(wanted, kind)
    )
    with source.open("rb") as original:
        return _store(run, original, safe, safe_kind)


def keep_text(run: RunDirectory, text: str, name: str, kind: str) -> Artifact:
    """Save a text as one of the run's files, and return the event that describes the file.

    The arguments are those of `keep`. A character that UTF-8 can't encode becomes ``?``.

    Raises:
        OSError: The file can't be written.
    """
    content = BytesIO(text.encode("utf-8", "replace"))
    return _store(run, content, safe_name(name), safe_name(kind))


def _store(run: RunDirectory, content: BinaryIO, name: str, kind: str) -> Artifact:
    path = f"{run.artifacts.name}/{name}"
    with replacing(run.path, path) as copy:
        while chunk := content.read(_CHUNK):
            copy.write(chunk)
        size = copy.tell()
    return Artifact(now_us(), name, kind, path, size)


def open_artifact(run: RunDirectory, artifact: Artifact) -> BinaryIO | None:
    """Open an artifact's file; ``None`` if it is no plain file in the run's own folder.

    The journal is untrusted: it may name a path outside the folder.
    """
    if not artifact.path.startswith(f"{run.artifacts.name}/"):
        return None
    try:
        return open_plain(run.path, artifact.path)
    except (OSError, ValueError):
        return None


def artifact_path(run: RunDirectory, artifact: Artifact) -> Path | None:
    """Return the path of an artifact's file; ``None`` if it is no plain file in the run's own folder."""
    file = open_artifact(run, artifact)
    if file is None:
        return None
    file.close()
    return run.path / artifact.path


def read_postmortem(run: RunDirectory) -> str | None:
    """Return the report on a run's bad end, in Markdown; ``None`` if no report can be read."""
    try:
        text = read_plain(run.path, f"{run.artifacts.name}/{POSTMORTEM_FILE}", _MOST_TEXT)
    except OSError:
        return None
    return text.decode("utf-8", "replace")


def postmortem_title(run: RunDirectory) -> str | None:
    """Return the title of the report on a run's bad end; ``None`` if no report can be read."""
    text = read_postmortem(run)
    return text and (text.partition("\n")[0].removeprefix("# ").strip() or None)


def _require_a_file(source: Path) -> None:
    """Raise ``ValueError`` if ``source`` is no plain file: reading a device or a pipe may never end."""
    if source.is_file():
        return
    if source.is_dir():
        raise ValueError("it is a folder: pass an archive of it, made with shutil.make_archive")
    if source.exists():
        raise ValueError(
            "it is a device, a pipe or a socket: write its data to a file, and pass that file"
        )
    raise ValueError(
        "there is no such file; write it before you call save_artifact, and pass a folder as an archive"
    )


class Names:
    """Unique names for a run's files.

    Two given names can become equal when characters are replaced, and files of two kinds can have one name.
    In both cases, memlog adds the kind to the later file's name. If the new name is taken, too, memlog adds a
    digest of the given name and kind instead.
    """

    def __init__(self) -> None:
        # No user's file has an empty original name. So no user's file gets one of these names.
        self._names = {name: ("", kind) for name, kind in _OWN}

    def give(self, name: str, kind: str) -> tuple[str, str]:
        """Return the name and the kind under which a file is saved; always the same for the same arguments.

        Raises:
            ValueError: The name or the kind is not text, or no usable character is left of it.
        """
        for field, text in (("name", name), ("kind", kind)):
            if not isinstance(text, str):
                raise ValueError(  # noqa: TRY004 - the error of every unusable name
                    f"its {field} is {text!r}: pass text, such as 'report'"
                )
        safe_kind = safe_name(kind)
        wanted = safe_name(name)
        suffix = Path(wanted).suffix[:32]
        stem = wanted.removesuffix(suffix)
        of_its_kind = _fitting(stem, f"-{safe_kind[:64]}{suffix}")
        digest = _fitting(stem, f"-{_digest(name, kind)}{suffix}")
        for given in (wanted, of_its_kind):
            if self._is_free(given, (name, kind)):
                return given, safe_kind
        return digest, safe_kind

    def _is_free(self, given: str, original: tuple[str, str]) -> bool:
        # Some file systems ignore the case of letters.
        return self._names.setdefault(given.casefold(), original) == original


def _digest(*texts: str) -> str:
    import hashlib  # noqa: PLC0415 - takes 2 ms, and most runs need no digest

    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.blake2s(joined, digest_size=4).hexdigest()


def _fitting(stem: str, tail: str) -> str:
    return stem[: MAX_NAME - len(tail)] + tail


def safe_name(text: str) -> str:
    """Return ``text`` as a name that every tracker and file system accepts.

    Raises:
        ValueError: No usable character is left.
    """
    safe = _UNSAFE.sub("_", str(text)).lstrip(".")
    if not safe.strip("_-"):
        raise ValueError(f"{text!r} can't be a name: use letters, digits, '.', '_' and '-'")
    suffix = Path(safe).suffix[:32]
    return safe if len(safe) <= MAX_NAME else safe[: MAX_NAME - len(suffix)] + suffix


def not_kept(path: object, error: Exception) -> str:
    """Return one line that says why a file was not saved as an artifact, and what to do."""
    shown = f"{str(path)[:500]!r} was not saved as an artifact"
    if isinstance(error, ValueError):
        return f"{shown}: {error}"
    if isinstance(error, TypeError):
        return f"{shown}: pass a file's path"
    reason = getattr(error, "strerror", None) or type(error).__name__
    return f"{shown} ({reason}): pass a readable file, and check that the disk has free space"


def renamed(artifact: Artifact, name: str, kind: str) -> str | None:
    """Return one line with the new name and kind of a file; ``None`` if neither was changed."""
    if (artifact.name, artifact.kind) == (name, kind):
        return None
    return (
        f"artifact {name!r} ({kind!r}) is saved as {artifact.name!r} ({artifact.kind!r}): names in a run "
        "are unique, and contain only letters, digits, '.', '_' and '-'"
    )
