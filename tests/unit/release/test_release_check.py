"""The checks before a release."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CHECKOUT = Path(__file__).parents[3]
check = SimpleNamespace(**runpy.run_path(str(CHECKOUT / ".ci" / "release_check.py")))

BEFORE = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n- A command.\n\n## [0.1.0] - 2026-01-01\n- All.\n"
)
RELEASED = BEFORE.replace("[Unreleased]", "[0.2.0] - 2026-02-01")


def test_the_changelog_of_the_checkout_fits_its_version() -> None:
    from memlog import __version__

    text = (CHECKOUT / "CHANGELOG.md").read_text("utf-8")
    check.changelog(text, __version__, is_release=False)


def test_a_release_needs_its_section() -> None:
    assert check.changelog(BEFORE, "0.2.0", is_release=False) == "[Unreleased]"
    assert check.changelog(RELEASED, "0.2.0", is_release=True) == "[0.2.0] - 2026-02-01"


@pytest.mark.parametrize(
    ("text", "version", "is_release", "message"),
    [
        (BEFORE, "0.2.0", True, "move what is unreleased under '## [0.2.0] - YYYY-MM-DD'"),
        (RELEASED, "0.3.0", False, "move what is unreleased under '## [0.3.0] - YYYY-MM-DD'"),
        (RELEASED.replace(" - 2026-02-01", ""), "0.2.0", True, "YYYY-MM-DD"),
        (BEFORE.replace("- A command.\n", ""), "0.2.0", False, "lists no change"),
        ("# Changelog\n", "0.2.0", False, "move what is unreleased"),
    ],
)
def test_a_changelog_without_the_versions_changes_fails(
    text: str, version: str, is_release: bool, message: str
) -> None:
    with pytest.raises(check.CheckError) as failed:
        check.changelog(text, version, is_release=is_release)
    assert message in str(failed.value)
    assert "\n" not in str(failed.value)


def test_builds_that_differ_are_named(tmp_path: Path) -> None:
    for folder, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memlog.whl").write_bytes(content)
        (tmp_path / folder / "memlog.tar.gz").write_bytes(b"same")
    (tmp_path / "a" / "alone.whl").write_bytes(b"")
    assert check.differences(tmp_path / "a", tmp_path / "b") == ["alone.whl", "memlog.whl"]


def test_a_tag_of_another_version_is_refused() -> None:
    command = [sys.executable, ".ci/release_check.py", "--tag", "v99.0.0"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the tag is v99.0.0, and memlog/_version.py has " in done.stderr.splitlines()[-1]


def test_a_program_that_fails_is_told_in_one_line() -> None:
    with pytest.raises(check.CheckError, match=r"^false: nothing was printed$"):
        check.run(["false"])
