"""Checks before a release, without a network: `make release-check`. One line for each, with its seconds.

    python .ci/release_check.py               # the state of the checkout
    python .ci/release_check.py --tag v0.2.0  # also: the changelog and the version are those of this release
    python .ci/release_check.py --dist dist   # also: keep the checked wheel and sdist

The wheel and the sdist are built twice and compared. The wheel is then installed without extras into a new
environment. pip uses no index: the dependencies are copied from the environment that runs this program. npm
uses its cache, and the registry only for a library that the cache lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.metadata import ExceptionGroup, Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trove_classifiers import classifiers

CHECKOUT = Path(__file__).resolve().parents[1]
LIBRARIES = ("memlog/artifacts/_speedscope/index.html", "memlog/reports/page/_uplot/uPlot.min.css")
"""Files that npm's client fetches into the wheel."""
GROWS = "The process's memory grows by "


class CheckError(Exception):
    """A check failed. The message is one line with the remedy."""


def changelog(text: str, version: str, *, is_release: bool) -> str:
    """Check that the changelog's top section fits the version. Return its heading.

    Args:
        text: The changelog.
        version: Version in `memlog/_version.py`.
        is_release: True if this version is released now. Before, the top section may be *Unreleased*.

    Raises:
        CheckError: The section is missing, misplaced, undated or empty.
    """
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    heading, _, body = (sections or [""])[0].partition("\n")
    if is_release or not heading.startswith("[Unreleased]"):
        wanted = rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"
        if not re.fullmatch(wanted, heading.strip()):
            raise CheckError(
                f"the changelog's top section is {heading.strip()!r}: "
                f"move what is unreleased under '## [{version}] - YYYY-MM-DD'"
            )
    if not re.search(r"^- ", body, re.MULTILINE):
        raise CheckError(
            f"the changelog's section {heading.strip()!r} lists no change: add a line for each"
        )
    return heading.strip()


def differences(first: Path, second: Path) -> list[str]:
    """Return the names of files that two folders do not have with the same bytes."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    return sorted(
        name
        for name in names
        if not ((first / name).is_file() and (second / name).is_file())
        or (first / name).read_bytes() != (second / name).read_bytes()
    )


def build(to: Path, umask: int) -> None:
    """Build the sdist, and the wheel from the sdist, in the form that a release has."""
    variables = {
        **os.environ,
        "SOURCE_DATE_EPOCH": output("git", "log", "-1", "--format=%ct").strip(),
        "npm_config_prefer_offline": "true",
    }
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(to), str(CHECKOUT)]
    run(command, variables, umask=umask)


def built_twice(scratch: Path) -> str:
    """Build twice, with other permissions the second time. Return the names of the files."""
    first, second = scratch / "dist", scratch / "again"
    build(first, 0o022)
    build(second, 0o077)
    different = differences(first, second)
    if different:
        raise CheckError(
            f"two builds differ in {', '.join(different)}: compare them with diffoscope"
        )
    wheel, _ = files_in(first)
    with zipfile.ZipFile(wheel) as archive:
        missing = [name for name in LIBRARIES if name not in archive.namelist()]
    if missing:
        raise CheckError(
            f"the wheel lacks {missing[0]}: install npm, and run it once with a network"
        )
    return ", ".join(
        f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in files_in(first)
    )


def files_in(dist: Path) -> tuple[Path, Path]:
    """Return the wheel and the sdist in a folder."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def metadata_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return archive.read(name)


def metadata(dist: Path, version: str) -> str:
    """Check the metadata of the wheel and the sdist as the package index does. Return a summary."""
    wheel, sdist = files_in(dist)
    of_wheel = metadata_of(wheel)
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        of_sdist = b"" if member is None else member.read()
    if of_wheel != of_sdist:
        raise CheckError(
            "the wheel and the sdist have different metadata: build the wheel from the sdist"
        )
    try:
        found = Metadata.from_email(of_wheel, validate=True)
    except ExceptionGroup as error:
        raise CheckError(f"metadata: {'; '.join(map(str, error.exceptions))}") from None
    unknown = sorted(set(found.classifiers or ()) - set(classifiers))
    if unknown:
        raise CheckError(f"unknown classifiers: {', '.join(unknown)}")
    if str(found.version) != version or not found.description:
        raise CheckError(f"metadata has version {found.version}, or no description")
    return f"{found.name} {found.version}, metadata {found.metadata_version}"


def dependencies(wheel: Path) -> list[Distribution]:
    """Return the installed distributions that a wheel needs without extras, and those that these need."""
    found = Metadata.from_email(metadata_of(wheel), validate=True)
    waiting, known = list(found.requires_dist or ()), dict[str, Distribution]()
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name not in known and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            known[name] = distribution(name)
            waiting += map(Requirement, known[name].requires or ())
    return list(known.values())


def installed(wheel: Path, scratch: Path) -> str:
    """Install a wheel and copies of its dependencies into a new environment. Return its packages."""
    environment = scratch / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    site = Path(
        output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    needed = dependencies(wheel)
    for each in needed:
        for file in each.files or ():
            if ".." not in file.parts:  # programs, which stand outside
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(each.locate_file(file)), site / file)
    # With the dependencies: pip fails if one of them is missing or too old.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    run([*pip, "install", "--no-index", str(wheel)], clean())
    run([*pip, "check"], clean())
    return ", ".join(sorted(f"{each.name} {each.version}" for each in needed))


def demonstrated(scratch: Path) -> str:
    """Run `memlog demo --tiny` in the new environment. Return its last finding."""
    (folder := scratch / "work").mkdir()
    memlog = str(scratch / "environment" / "bin" / "memlog")
    run([memlog, "demo", "--tiny"], clean(), folder)
    verdict = run([memlog, "show", "latest"], clean(), folder).stdout.splitlines()[0]
    if not verdict.startswith(GROWS):
        raise CheckError(f"`memlog demo --tiny` did not report its mistake: {verdict}")
    return verdict.partition(",")[0]


def clean() -> dict[str, str]:
    """Return the variables of a user who has just installed memlog."""
    own = ("PYTHON", "VIRTUAL_ENV", "MEMLOG_", "PIP_")
    return {key: value for key, value in os.environ.items() if not key.startswith(own)}


def run(
    command: Sequence[str],
    variables: dict[str, str] | None = None,
    folder: Path = CHECKOUT,
    umask: int = -1,
) -> subprocess.CompletedProcess[str]:
    """Run a program. If it fails, raise `CheckError` with its last line."""
    done = subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, check=False, umask=umask
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was printed").splitlines()
        raise CheckError(f"{' '.join(command)}: {said[-1]}")
    return done


def output(*command: str) -> str:
    return run(command).stdout


def files_of_the_project() -> str:
    """Check the workflows, the issue forms, the matrix and the recipe by their tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:anyio", "-p", "no:hydra_pytest"]
    return run([*command, "tests/unit/release"]).stdout.strip().splitlines()[-1]


def main() -> int:
    """Run all checks. Return 1 if one fails; those that need its result do not run."""
    parser = argparse.ArgumentParser(description="Check that memlog can be released, offline.")
    parser.add_argument("--tag", help="git tag of the release, such as v0.2.0")
    parser.add_argument(
        "--dist", type=Path, help="folder in which to leave the wheel and the sdist"
    )
    args = parser.parse_args()
    version = re.findall(r'"(.+)"', (CHECKOUT / "memlog/_version.py").read_text())[-1]
    if args.tag not in (None, f"v{version}"):
        parser.error(f"the tag is {args.tag}, and memlog/_version.py has {version}")
    text = (CHECKOUT / "CHANGELOG.md").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="memlog-release-") as name:
        scratch = Path(name)
        dist = scratch / "dist"
        checks: dict[str, Callable[[], str]] = {
            "changelog": lambda: changelog(text, version, is_release=args.tag is not None),
            "files of the project": files_of_the_project,
            "two equal builds": lambda: built_twice(scratch),
            "metadata": lambda: metadata(dist, version),
            "installed without extras": lambda: installed(files_in(dist)[0], scratch),
            "memlog demo --tiny": lambda: demonstrated(scratch),
        }
        for title, check in checks.items():
            began = time.monotonic()
            try:
                result = check()
            except CheckError as error:
                print(f"✗  {title}: {error}", flush=True)
                return 1
            print(f"✓  {title:25} {time.monotonic() - began:5.1f} s  {result}", flush=True)
        if args.dist is not None:
            args.dist.mkdir(parents=True, exist_ok=True)
            for file in files_in(dist):
                shutil.copy(file, args.dist)
    return 0


if __name__ == "__main__":
    sys.exit(main())
