"""The origin of a run: its command and its commit, read beside the trainer."""

import os
import subprocess
from pathlib import Path

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.redact import shell_line
from memlog.delivery.helper.origin import OriginReader, read_origin
from memlog.events import Event, Origin
from memlog.metrics import parameters_of


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "ünï").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("pass\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_and_the_folder_are_those_of_the_working_directory(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    origin = read_origin(os.getpid(), repository / "src")
    assert (origin.git_commit, origin.working_directory) == (commit, "src")
    assert origin.git_uncommitted_changes is False
    assert read_origin(os.getpid(), repository).working_directory == "."
    assert read_origin(os.getpid(), repository / "src" / "ünï").working_directory == "src/ünï"


def test_a_changed_file_counts_and_a_new_one_does_not(repository: Path) -> None:
    (repository / "memlog_runs").write_text("new")
    os.utime(repository / "src" / "train.py", (1, 1))  # the same content at another time
    assert read_origin(os.getpid(), repository).git_uncommitted_changes is False
    (repository / "src" / "train.py").write_text("fail\n")
    assert read_origin(os.getpid(), repository).git_uncommitted_changes is True


def test_nothing_is_written_into_the_repository(repository: Path) -> None:
    os.utime(repository / "src" / "train.py", (1, 1))
    index = (repository / ".git" / "index").read_bytes()
    read_origin(os.getpid(), repository)
    assert (repository / ".git" / "index").read_bytes() == index
    assert not list((repository / ".git").glob("*.lock"))


def test_outside_a_repository_or_without_git_the_rest_is_known(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = read_origin(os.getpid(), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for origin in (outside, read_origin(os.getpid(), repository)):
        assert (origin.git_commit, origin.git_uncommitted_changes) == (None, None)
        assert origin.working_directory is None
        assert "python" in (origin.command or "")
        parameters = parameters_of(origin)
        assert parameters is not None
        assert set(parameters.values) == {"command", "python", "host"}


def test_a_repository_without_a_commit_is_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert read_origin(os.getpid(), tmp_path).working_directory is None


def test_what_a_process_title_leaves_of_the_command_is_not_shown(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/cat", "-", "", ""], stdin=subprocess.PIPE) as process:
        assert read_origin(process.pid, tmp_path).command == "/bin/cat -"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "s3cret"],
        ["--api-key=s3cret"],
        ["--wandb.api_key=s3cret"],
        ["wandb.api_key=s3cret"],
        ["--password", "s3cret"],
        ["-token", "s3cret"],
        ["HF_TOKEN=s3cret"],
        ["--store", "postgresql://anna:s3cret@host/db"],
        ["--store", "postgresql://anna:s3 cret@host/db s3cret@x"],
        ["--header", "Authorization: Bearer s3cret"],
        ["--dsn", "host=db password=s3cret"],
    ],
)
def test_secrets_of_a_command_are_not_shown(arguments: list[str]) -> None:
    line = shell_line(["python", "train.py", *arguments, "--lr", "0.1"])
    assert "s3" not in line
    assert line.startswith("python train.py ")
    assert line.endswith(" --lr 0.1")


def test_other_options_of_a_command_stay() -> None:
    command = ["python", "my script.py", "--tokenizer", "gpt2", "--passes=3", "--max-tokens", "8"]
    assert shell_line(command) == (
        "python 'my script.py' --tokenizer gpt2 --passes=3 --max-tokens 8"
    )
    assert shell_line(["--use-auth", "--lr", "1"]) == "--use-auth --lr 1"
    assert shell_line(["a\udc80b"]) == "'a?b'"


def test_each_run_of_the_users_gets_the_origin_once() -> None:
    published: list[Event] = []
    reader = OriginReader(os.getpid(), published.append, Diagnostics())
    reader.start()
    reader.finish()
    reader.look()
    assert [type(event) for event in published] == [Origin]
    reader.begin_another_run()
    reader.look()
    reader.look()
    assert published == [published[0]] * 2


def test_a_run_that_has_no_origin_publishes_none() -> None:
    published: list[Event] = []
    reader = OriginReader(os.getpid(), published.append, Diagnostics())
    reader.finish()
    assert published == []
