"""Files for GitHub and conda-forge: nothing in this repository runs them, so what they name must exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[3]
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 can't read TOML")
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT: dict[str, Any] = SETTINGS["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONDA_NAMES = {"torch": "pytorch"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists_and_stores_no_secret(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    programs = [step["run"] for step in steps_of(path) if "run" in step]
    assert programs
    for program in programs:
        for target in re.findall(r"\bmake ([\w-]+)", program):
            assert target in targets
        for file in re.findall(r"\.(?:ci|github)/\S+", program):
            assert (ROOT / file).is_file()
    assert "secrets." not in path.read_text("utf-8")
    pinned = re.compile(r"[\w-]+/[\w.-]+@(v\d+|release/v\d+|[0-9a-f]{40})")
    for step in steps_of(path):
        assert "run" in step or pinned.fullmatch(step["uses"])
    assert "permissions" in read(path)


def test_ci_runs_what_a_person_runs() -> None:
    programs = [step.get("run") for step in steps_of(ROOT / ".github/workflows/ci.yml")]
    assert ".ci/run" in programs
    assert "make release-check" in programs
    newest = read(ROOT / ".github" / "matrix.yml")["torch"][-1]
    assert f"make test-oldest-torch OLDEST_TORCH={newest}" in programs


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    jobs = read(ROOT / ".github/workflows/publish.yml")["jobs"]
    allowed = {name: job["permissions"].get("id-token") for name, job in jobs.items()}
    assert allowed == {"build": None, "pypi": "write"}
    assert jobs["pypi"]["needs"] == "build"
    assert [step["uses"].partition("@")[0] for step in jobs["pypi"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_the_matrix_has_the_versions_that_the_package_promises() -> None:
    matrix = read(ROOT / ".github" / "matrix.yml")
    assert all(isinstance(version, str) for versions in matrix.values() for version in versions)
    prefix = "Programming Language :: Python :: 3."
    minors = [one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    assert matrix["full"] == [f"3.{minor}" for minor in minors]
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={matrix['full'][0]}")
    newest = Version(matrix["full"][-1])
    assert all(Version(version.removesuffix("t")) > newest for version in matrix["next"])

    versions = [Version(version) for version in matrix["torch"]]
    assert versions == sorted(set(versions))
    (torch,) = map(Requirement, PROJECT["optional-dependencies"]["torch"])
    assert torch.specifier == SpecifierSet(f">={versions[0]}")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", pins, re.MULTILINE)
    assert pinned in matrix["torch"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(path: Path) -> None:
    form = read(path)
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(form)
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_a_bug_report_asks_for_the_output_of_commands_that_exist() -> None:
    from memlog.cli.main import COMMANDS

    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8")
    named = re.findall(r"`memlog ([a-z]+)", text)
    assert {"doctor", "show"} <= set(named) <= set(COMMANDS)


def test_the_conda_recipe_has_the_packages_dependencies() -> None:
    from memlog import __version__

    recipe = read(ROOT / "conda" / "recipe.yaml")
    assert recipe["context"]["version"] == __version__
    assert recipe["package"]["name"] == PROJECT["name"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]
    needed = map(Requirement, PROJECT["dependencies"])
    wanted = [f"{CONDA_NAMES.get(one.name, one.name)} {one.specifier}" for one in needed]
    assert recipe["requirements"]["run"] == ["python >=${{ python_min }}", *wanted]
    extras = [
        Requirement(PROJECT["optional-dependencies"][name][0])
        for name in ("torch", "mlflow", "wandb", "tensorboard")
    ]
    assert recipe["requirements"]["run_constraints"] == [
        f"{CONDA_NAMES.get(one.name, one.name)} {one.specifier}" for one in extras
    ]
    (builder,) = map(Requirement, SETTINGS["build-system"]["requires"])
    assert f"{builder.name} {builder.specifier}" in recipe["requirements"]["host"]
    (script,) = recipe["build"]["python"]["entry_points"]
    assert script == "memlog = " + PROJECT["scripts"]["memlog"]
