"""Choice of the user's writer that memlog joins."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorboardX
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from memlog_tensorboard import TensorboardBackend


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def writer(opened: ExitStack, folder: Path) -> EventFileWriter:
    made = EventFileWriter(str(folder))
    opened.callback(made.close)
    return made


def joined(backend: TensorboardBackend) -> str | None:
    run = backend.active_run()
    return None if run is None else run.run_id


def test_it_is_the_one_opened_last_until_that_is_closed(tmp_path: Path, opened: ExitStack) -> None:
    backend = TensorboardBackend()
    assert joined(backend) is None
    writer(opened, tmp_path / "a")
    assert joined(backend) == str(tmp_path / "a")
    second = writer(opened, tmp_path / "b")
    assert joined(backend) == str(tmp_path / "b")
    second.close()
    assert joined(backend) == str(tmp_path / "a")


def test_a_writer_within_anothers_folder_is_a_part_of_it(tmp_path: Path, opened: ExitStack) -> None:
    writer(opened, tmp_path / "a")
    writer(opened, tmp_path / "a" / "loss_train")
    assert joined(TensorboardBackend()) == str(tmp_path / "a")


def test_a_relative_folder_is_resolved_when_it_is_first_seen(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = TensorboardBackend()
    writer(opened, Path("a"))
    assert joined(backend) == str(tmp_path / "a")
    monkeypatch.chdir("/")
    assert joined(backend) == str(tmp_path / "a")


def test_tensorboardx_is_found_too(tmp_path: Path) -> None:
    made = tensorboardX.SummaryWriter(str(tmp_path / "x"))
    assert joined(TensorboardBackend()) == str(tmp_path / "x")
    made.close()
