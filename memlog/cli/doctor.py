"""``memlog doctor``: what is installed, what memlog finds of the machine, and what needs a remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console

from memlog._internal import installation
from memlog._internal.connections import (
    does_not_answer,
    netrc_files,
    origin,
    path_of,
    reason_of,
)
from memlog._internal.redact import bare_address
from memlog._internal.terminal import format_bytes
from memlog._version import __version__
from memlog.cli import SETTINGS
from memlog.cli.addresses import connection_of
from memlog.cli.output import dir_option, json_option, page, plain, print_json, sign, table
from memlog.errors import MemlogError, MissingExtraError
from memlog.journal import list_runs
from memlog.probes.machine import available_memory, machine_memory, memory_limit, read_cgroup
from memlog.probes.nvml import NvidiaDriver, read_driver
from memlog.reports import encode
from memlog.settings import enabled_by_environment, environment_backends, runs_directory
from memlog.sink import ENTRY_POINT_GROUP, LOCAL, Backend, home_of, load_backend

SCHEMA = 1
CheckState = Literal["ok", "note", "problem"]
_SIGNS: dict[CheckState, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "note": ("·", "-", "dim"),
    "problem": ("✗", "problem", "red"),
}
_FRAMEWORKS = (
    "lightning",
    "pytorch-lightning",
    "transformers",
    "trl",
    "accelerate",
    "ray",
    "keras",
    "hydra-core",
)
_TIMEOUT = 3.0
"""Seconds to wait for a tracker's answer."""
_PATIENCE = 5.0
"""Seconds to wait for all trackers together. A search for a host's name has no time limit of its own."""
_SCARCE = 1024**3
"""Free bytes of the disk with the runs, below which it counts as full: half of a journal's limit."""
_SERVER_ERROR = 500
_TOO_MANY = 429
_PROXY_REFUSES = 407
_DATABASES = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""Ports of MLflow's databases, by the scheme of their addresses."""
_CUDA_BUILD = re.compile(r"^cuda\b[^=\n]*= '(\d+)\.(\d+)'", re.MULTILINE)


class Check(msgspec.Struct, frozen=True):
    """One line of the command."""

    name: str
    state: CheckState
    text: str
    remedy: str | None = None


class Checkup(msgspec.Struct, frozen=True):
    """Document of ``memlog doctor --json``."""

    schema: int
    ok: bool
    checks: list[Check]


@click.command(
    context_settings=SETTINGS, short_help="Check the installation, and say what to mend."
)
@json_option
@dir_option
def doctor(directory: Path | None, as_json: bool) -> None:
    """Check the installation, the runs folder, the trackers and the machine.

    Each line is one check, and ends with the remedy if there is a problem. A tracker is asked only if
    MEMLOG_BACKEND names it, or the environment has an address or credentials for it. No credentials are sent.

    Exit code 1 if something needs a remedy.
    """
    checks = list(_checks(directory))
    problems = sum(check.state == "problem" for check in checks)
    if as_json:
        print_json(encode(Checkup(SCHEMA, not problems, checks)))
    else:
        with page() as console:
            _print(console, checks)
            console.print()
            console.print(plain(_conclusion(problems, len(checks))))
    if problems:
        click.get_current_context().exit(1)


def _print(console: Console, checks: list[Check]) -> None:
    rows = table(console)
    rows.show_header = False
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for check in checks:
        symbol, word, style = _SIGNS[check.state]
        text = check.text if check.remedy is None else f"{check.text}: {check.remedy}"
        rows.add_row(plain(sign(console, symbol, word), style), plain(check.name), plain(text))
    console.print(rows)


def _conclusion(problems: int, checks: int) -> str:
    if not problems:
        return "Nothing needs a remedy."
    return f"{problems} of {checks} {'checks needs' if problems == 1 else 'checks need'} a remedy."


def _checks(directory: Path | None) -> Iterator[Check]:
    yield from _installation()
    yield from _settings()
    yield _runs(directory)
    yield from _torch()
    yield from _trackers()
    yield _frameworks()
    yield _memory()


def _installation() -> Iterator[Check]:
    package = Path(installation.__file__).parents[1]
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("memlog", "ok", f"{__version__} in {package}, {system}")
    if sys.platform == "win32":
        yield Check(
            "system", "problem", "memlog runs on Linux and macOS", "on Windows, train in WSL 2"
        )
    for other in _other_owners():
        text, remedy = installation.explained(other)
        yield Check("import name", "problem", text, remedy)


def _other_owners() -> list[str]:
    """Return the other distributions that own the import name, such as ``memlog 1.2``."""
    names = {*metadata.packages_distributions().get("memlog", ())}
    owners = {
        f"{name} {metadata.version(name)}"
        for name in names
        if _normal(name) != installation.DISTRIBUTION
    }
    over = installation.overwriting()
    return sorted(owners | ({over} if over else set()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _settings() -> Iterator[Check]:
    if not enabled_by_environment():
        value = os.environ["MEMLOG_ENABLED"]
        yield Check(
            "settings",
            "problem",
            f"MEMLOG_ENABLED={value} switches memlog off",
            "remove it from the environment to record",
        )


def _runs(directory: Path | None) -> Check:
    try:
        root = runs_directory(directory)
        exists = next(path for path in (root, *root.parents) if path.exists())
        if not (exists.is_dir() and os.access(exists, os.W_OK | os.X_OK)):
            text = f"{root} can't be written"
            return Check(
                "runs folder", "problem", text, "pass dir=…, or set MEMLOG_DIR to a folder"
            )
        free = shutil.disk_usage(exists).free
        runs = list_runs(root)
    except (MemlogError, OSError) as error:
        return Check("runs folder", "problem", str(error))
    count = f"{len(runs):,} {'run' if len(runs) == 1 else 'runs'}"
    text = f"{root}: {count if root.exists() else 'not made yet'}, {format_bytes(free)} free"
    if free < _SCARCE:
        return Check("runs folder", "problem", text, "set MEMLOG_DIR to a disk with more space")
    return Check("runs folder", "ok", text)


def _torch() -> Iterator[Check]:
    driver, version = read_driver(), _version("torch")
    if version is None:
        needed = _needed("torch") or "torch"
        yield Check(
            "torch", "note", f"not installed; layers and estimates need it: pip install '{needed}'"
        )
    else:
        yield _outdated("torch", version) or Check("torch", "ok", version)
    yield _cuda(driver, None if version is None else _cuda_build())


def _cuda(driver: NvidiaDriver | None, build: tuple[int, int] | str | None) -> Check:
    if driver is None:
        return Check("CUDA", "note", "no NVIDIA driver")
    sizes = [
        device.name + ("" if device.memory is None else f" {format_bytes(device.memory)}")
        for device in driver.devices
    ]
    counted = ", ".join(
        name if sizes.count(name) == 1 else f"{sizes.count(name)} of {name}"
        for name in dict.fromkeys(sizes)
    )
    newest = "{}.{}".format(*driver.cuda)
    text = f"{counted or 'no device'}, driver {driver.version} for CUDA {newest}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        text += f", CUDA_VISIBLE_DEVICES={visible}"
    if not driver.devices or build is None:
        return Check("CUDA", "note", text)
    if isinstance(build, str):
        return Check(
            "CUDA",
            "problem",
            f"{text}; torch is {build}",
            "install a build of torch for CUDA (https://pytorch.org/get-started)",
        )
    wanted = "{}.{}".format(*build)
    if build[0] > driver.cuda[0]:
        return Check(
            "CUDA",
            "problem",
            f"{text}; torch needs CUDA {wanted}",
            f"update the driver, or install a build of torch for CUDA {driver.cuda[0]}",
        )
    return Check("CUDA", "ok", f"{text}; torch is for CUDA {wanted}")


def _cuda_build() -> tuple[int, int] | str:
    """Return the version of CUDA that torch was built for, or the kind of another build; import no torch."""
    try:
        file = metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(file)).read_text(encoding="utf-8")
    except OSError:
        return "of an unknown build"
    match = _CUDA_BUILD.search(text)
    if match is not None:
        return int(match[1]), int(match[2])
    return (
        "a build for ROCm"
        if re.search(r"^hip\b[^=\n]*= '", text, re.MULTILINE)
        else "a build for CPUs"
    )


def _trackers() -> Iterator[Check]:
    """Yield a check for each tracker. All addresses are asked at the same time."""
    named = environment_backends()
    entries = {entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    checks: dict[str, Check] = {}
    threads = []
    for name in sorted({*entries, *named} - {LOCAL}):
        try:
            backend = load_backend(name)
        except MissingExtraError as error:
            state: CheckState = "problem" if name in named else "note"
            checks[name] = Check(name, state, "not installed", str(error).partition(": ")[2])
            continue
        except Exception as error:  # noqa: BLE001 - a package of a third party
            checks[name] = Check(name, "problem", str(error))
            continue
        # This check remains if the tracker has not answered when the waiting ends.
        checks[name] = Check(
            name,
            "problem",
            f"no answer within {_PATIENCE:g} s",
            "correct its address, or start it; runs are kept, and `memlog sync` delivers them later",
        )

        # The default arguments keep this tracker's values, because the loop goes on while the
        # thread runs.
        def ask(backend: Backend = backend, name: str = name) -> None:
            try:
                checks[name] = _tracker(backend, is_named=name in named)
            except Exception as error:  # noqa: BLE001 - a package of a third party
                checks[name] = Check(name, "problem", f"{type(error).__name__}: {error}")

        threads.append(threading.Thread(target=ask, daemon=True))
        threads[-1].start()
    ends = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0))
    yield from [checks[name] for name in sorted(checks)]


def _tracker(backend: Backend, *, is_named: bool) -> Check:
    """Check the version of a tracker's client, and whether the tracker answers at the client's address."""
    name = backend.name
    version = _version(backend.requires) or "of an unknown version"
    outdated = _outdated(backend.requires, version)
    if outdated is not None:
        return outdated
    connection, home = connection_of(backend), home_of(backend)
    mode = connection.environment.get(f"{name.upper()}_MODE")
    if mode in ("offline", "disabled", "dryrun"):
        return Check(name, "note", f"{version}, {name.upper()}_MODE={mode}: no server is asked")
    address = connection.uri or home.address
    if address is None:
        return _without_address(backend, version, home.defaults, is_named=is_named)
    path = path_of(address)
    shown = bare_address(address) if path is None else str(path)
    is_set_up = is_named or connection.uri or home.credentials or any(netrc_files(address))
    if not is_set_up:
        return Check(name, "note", f"{version}, not set up: {shown} is not asked")
    problem = _unanswered(name, address)
    if problem is None:
        answers = f"{shown} answers" if path is None else f"in {shown}"
        return Check(name, "ok", f"{version}, {answers}")
    variables = (
        variable
        for variable, value in connection.environment.items()
        if value.rstrip("/") == address.rstrip("/")
    )
    return Check(
        name,
        "problem",
        f"{version}, {problem}",
        f"correct {next(variables, 'its address')}, or start it; runs are kept, and `memlog sync` "
        "delivers them later",
    )


def _without_address(
    backend: Backend, version: str, defaults: tuple[str, ...], *, is_named: bool
) -> Check:
    """Check a backend that has no address. The client may have one, such as OpenTelemetry's."""
    ask = getattr(backend, "problem", None)
    problem = ask() if is_named and ask is not None else None
    if problem is not None:
        remedy = "correct its variables, or start it"
        return Check(backend.name, "problem", f"{version}, {problem}", remedy)
    return Check(
        backend.name, "ok", f"{version}, in {' or '.join(defaults) or 'its default store'}"
    )


def _unanswered(name: str, address: str) -> str | None:
    """Return why a tracker can't be reached; ``None`` if it can, or if its kind of address can't be asked."""
    path = path_of(address)
    if path is not None:
        # A file that does not exist yet can be made if the nearest folder above it can be written.
        exists = next(folder for folder in (path, *path.parents) if folder.exists())
        return None if os.access(exists, os.W_OK) else f"{exists} can't be written"
    try:
        if origin(bare_address(address)) is not None:
            return _unanswered_request(name, bare_address(address))
        parts = urlsplit(address)
        port = _DATABASES.get(parts.scheme.partition("+")[0])
        if port is not None and parts.hostname and "," not in parts.netloc:
            where = (parts.hostname, parts.port or port)
            socket.create_connection(where, timeout=_TIMEOUT).close()
    except (OSError, ValueError) as error:
        text = str(error)
        return does_not_answer(name, address, text, reason_of(text) or text)
    return None


def _unanswered_request(name: str, address: str) -> str | None:
    """Request an address. Any answer counts but a server's error, "too many requests" and a proxy's refusal.

    An answer without a trusted certificate counts, too: the tracker's client may have other certificates.
    """
    try:
        urllib.request.urlopen(address, timeout=_TIMEOUT).close()  # noqa: S310 - `origin` knows its scheme
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= _SERVER_ERROR or error.code in (_TOO_MANY, _PROXY_REFUSES):
            return f"{name} at {address} answers {error.code}"
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):
            raise
    return None


def _frameworks() -> Check:
    installed = [f"{name} {version}" for name in _FRAMEWORKS if (version := _version(name))]
    return Check("trainers", "note", ", ".join(installed) or "none but your own loop")


def _memory() -> Check:
    group, machine = read_cgroup(os.getpid()), machine_memory()
    limit = memory_limit(group.limit, machine)
    of = (
        "the control group's limit"
        if limit == group.limit
        else "the machine's; no control group's limit"
    )
    text = (
        f"{format_bytes(limit)} ({of}), {format_bytes(available_memory())} available on the machine"
    )
    if group.limit is not None and group.used is not None:
        text += f", {format_bytes(group.used)} in use in the control group"
    return Check("memory", "ok", text)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _needed(distribution: str) -> str | None:
    """Return what an extra of memlog requires, such as ``torch>=2.6``; ``None`` if unknown."""
    try:
        requires = metadata.requires(installation.DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return None
    wanted = (requirement.partition(";")[0].strip() for requirement in requires)
    return next(
        (
            requirement
            for requirement in wanted
            if re.match(rf"{re.escape(distribution)}\b", requirement)
        ),
        None,
    )


def _outdated(distribution: str, version: str) -> Check | None:
    needed = _needed(distribution) or ""
    if _release(version) >= _release(needed.partition(">=")[2]):
        return None
    text = f"{version} is older than memlog needs"
    return Check(distribution, "problem", text, f"pip install '{needed}'")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
