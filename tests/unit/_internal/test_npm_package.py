"""Fetching browser libraries through npm: only with the pinned hash, unpacked into one folder."""

import dataclasses
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memlog._internal.npm_package import SPEEDSCOPE, UPLOT, FetchError, NpmPackage, cache_directory
from memlog.artifacts import server
from memlog.errors import ViewerUnavailableError

SOUND = {
    "package/LICENSE": b"MIT License: Jamie Wong",
    "package/package.json": b"{}",
    "package/bin/cli.mjs": b"run me",
    "package/dist/release/index.html": b"<html>",
    "package/dist/release/speedscope-X.js": b"script",
    "package/dist/release/source-code-pro.LICENSE.md": b"SIL OPEN FONT LICENSE",
    "package/dist/release/perf-vertx-stacks.txt": b"example",
    "package/dist/release/jfrview_bg-X.wasm": b"wasm",
}


def tarball(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in extra:
            archive.addfile(member)
    return path


def npm_that(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a PATH that has only the test's own ``npm``."""
    folder.mkdir()
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def unpacked(tmp_path: Path, files: dict[str, bytes], package: NpmPackage = SPEEDSCOPE) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    package.extract(tarball(tmp_path / "package.tgz", files), target)
    return target


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An install of memlog that was built without npm, for a user with an empty cache."""
    elsewhere = dataclasses.replace(SPEEDSCOPE, installed=tmp_path / "nowhere")
    monkeypatch.setattr(server, "SPEEDSCOPE", elsewhere)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_build_and_its_licences_are_unpacked_and_nothing_else(tmp_path: Path) -> None:
    target = unpacked(tmp_path, SOUND)
    assert {path.name for path in target.iterdir()} == {
        *("index.html", "speedscope-X.js", "source-code-pro.LICENSE.md", "LICENSES.txt"),
    }
    collected = (target / "LICENSES.txt").read_text()
    for owner in ("Jamie Wong", "SIL OPEN FONT LICENSE", "Jason Miller", "Khan Academy"):
        assert owner in collected
    assert SPEEDSCOPE.is_complete(target)


def test_of_uplot_the_script_the_style_and_the_licence_are_unpacked(tmp_path: Path) -> None:
    files = {
        "package/LICENSE": b"MIT License: Leon Sorokin",
        "package/dist/uPlot.iife.min.js": b"script",
        "package/dist/uPlot.iife.js": b"readable script",
        "package/dist/uPlot.min.css": b"style",
    }
    target = unpacked(tmp_path, files, UPLOT)
    names = {path.name for path in target.iterdir()}
    assert names == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSES.txt"}
    assert "Leon Sorokin" in (target / "LICENSES.txt").read_text()
    assert UPLOT.is_complete(target)


def test_what_may_not_be_fetched_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = dataclasses.replace(UPLOT, installed=tmp_path / "nowhere")
    npm_that(tmp_path / "bin", f"touch '{tmp_path}/asked'", monkeypatch)
    assert package.find(None) is None
    assert not (tmp_path / "asked").exists()


def test_a_tampered_tarball_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered = tarball(tmp_path / "tampered.tgz", SOUND)
    npm_that(tmp_path / "bin", f"/bin/cp '{tampered}' speedscope-1.25.0.tgz", monkeypatch)
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(FetchError, match=r"not speedscope 1\.25\.0, so memlog does not use it"):
        SPEEDSCOPE.fetch(cache / "speedscope")
    assert list(cache.iterdir()) == []


FAILURES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "not installed": lambda folder, patch: patch.setenv("PATH", str(folder)),
    r"exit 1\)": lambda folder, patch: npm_that(folder, "exit 1", patch),
    r"exit 0\)": lambda folder, patch: npm_that(folder, "exit 0", patch),
}


def test_npms_own_reason_and_a_fitting_remedy_are_printed(
    nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = """echo 'npm error code ECONNREFUSED
npm error errno ECONNREFUSED
npm error FetchError: request to http://127.0.0.1:9/speedscope failed, reason: connect ECONNREFUSED
npm error A complete log of this run can be found in: /root/x.log' >&2
exit 1"""
    npm_that(tmp_path / "bin", complaint, monkeypatch)
    with pytest.raises(ViewerUnavailableError) as raised:
        server.find_viewer(print)
    message = str(raised.value)
    assert (
        "(exit 1): ECONNREFUSED: FetchError: request to http://127.0.0.1:9/speedscope failed"
        in message
    )
    assert "`npm config get registry`" in message
    assert "install npm" not in message
    assert "\n" not in message


@pytest.mark.parametrize("message", FAILURES)
def test_without_a_working_npm_it_is_one_line(
    nothing_installed: None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAILURES[message](tmp_path / "bin", monkeypatch)
    with pytest.raises(ViewerUnavailableError, match=message):
        server.find_viewer(print)
    assert list((tmp_path / "memlog").iterdir()) == []


def test_the_cache_is_used_without_asking_npm(
    nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    cached = tmp_path / "memlog" / f"speedscope-{SPEEDSCOPE.version}"
    cached.mkdir(parents=True)
    SPEEDSCOPE.extract(tarball(tmp_path / "package.tgz", SOUND), cached)
    messages: list[str] = []
    assert server.find_viewer(messages.append) == cached
    assert messages == []


def test_a_cache_that_cannot_be_written_is_one_line(
    nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ViewerUnavailableError, match="file"):
        server.find_viewer(print)


def test_a_relative_cache_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path.home() / ".cache" / "memlog"
