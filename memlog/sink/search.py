"""Search for the backends of installed packages, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memlog._internal.diagnostics import warn
from memlog.errors import MissingExtraError, UnknownBackendError
from memlog.sink.protocols import LOCAL, Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

    from memlog._internal.connections import CredentialScope

ENTRY_POINT_GROUP = "memlog.sinks"


def home_of(backend: Backend) -> CredentialScope:
    """Return the tracker's address, and the names of the tracker's credentials in the environment.

    A variable of `Backend.connection` counts as a credential if its name looks like a credential's name. If
    this rule does not fit the tracker, the backend defines a method ``home`` that returns the
    `CredentialScope`.
    """
    if (own := getattr(backend, "home", None)) is not None:
        scope: CredentialScope = own()
        return scope
    # Imported here: a training process does not need it.
    from memlog._internal.connections import CredentialScope, secret_names  # noqa: PLC0415

    connection = backend.connection()
    return CredentialScope(connection.uri, secret_names(connection.environment))


def find_backends() -> dict[str, Backend]:
    """Return the registered backends by name. Leave out those whose client is not installed."""
    found = {}
    for entry in _entry_points():
        try:
            backend = entry.load()
        except Exception as error:  # noqa: BLE001 - the user did not ask for this backend by name
            warn(
                f"memlog: backend {entry.name!r} can't be loaded and is left out ({error!r}): install its "
                "package again, or uninstall it"
            )
            continue
        if is_installed(backend.requires):
            found[entry.name] = backend
    return found


def backends_to_look_in(names: Sequence[str]) -> dict[str, Backend]:
    """Return the backends in which to search for a user's run.

    These are the backends of the given names. If ``names`` is empty, they are all installed ones in whose
    trackers a user can open a run.

    Raises:
        UnknownBackendError: No installed package registers one of the names.
        MissingExtraError: The client of a named tracker is not installed.
    """
    if names:
        return {name: load_backend(name) for name in names if name != LOCAL}
    return {name: backend for name, backend in find_backends().items() if joins(backend)}


def joins(backend: Backend) -> bool:
    """Return the backend's ``joins`` (`ClientBackend.joins`), or True if it has no such attribute."""
    return bool(getattr(backend, "joins", True))


def load_backend(name: str) -> Backend:
    """Return the backend named ``name``.

    Raises:
        UnknownBackendError: No installed package registers that name.
        MissingExtraError: The client of the backend's tracker is not installed.
    """
    entries = {entry.name: entry for entry in _entry_points()}
    if name not in entries:
        import difflib  # noqa: PLC0415 - needed only for this message

        known = sorted([LOCAL, *entries])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownBackendError(
            f"no backend is called {name!r}: {hint}available: {', '.join(known)}"
        )
    backend: Backend = entries[name].load()
    if not is_installed(backend.requires):
        raise MissingExtraError(
            f"backend {name!r} needs the package {backend.requires!r}, which is not installed: "
            f"pip install {_packages(entries[name], backend)}"
        )
    return backend


def _packages(entry: EntryPoint, backend: Backend) -> str:
    """Return pip's arguments for the packages that the backend's extra installs.

    The extra itself can't be an argument, because the backend may not be in a package index.
    """
    extra = f"extra == '{backend.extra}'"
    lines = (line.replace('"', "'") for line in (entry.dist and entry.dist.requires) or ())
    wanted = [f"'{line.partition(';')[0].strip()}'" for line in lines if extra in line]
    return " ".join(wanted) or backend.requires


def _entry_points() -> EntryPoints:
    # Imported here because this import takes 10 ms, and `import memlog` does not need it.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=ENTRY_POINT_GROUP)


def is_installed(module: str) -> bool:
    """Return True if ``module`` is really installed.

    A folder of that name in the working directory is not enough. For example, W&B creates a folder called
    ``wandb``. Python takes such a folder for a namespace package, whose ``origin`` is ``None``.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # sys.modules has another object under this name
        return False
    return spec is not None and spec.origin is not None
