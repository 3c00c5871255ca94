"""Choice of the user's writer that memlog joins."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorboardX
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from memlog_tensorboard import TensorboardBackend
from memlog_tensorboard.backend import run_in


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


def taken(backend: TensorboardBackend) -> Mapping[int, int]:
    run = backend.active_run()
    assert run is not None
    return backend.take_numbers(run)


def test_numbers_are_counted_until_they_are_taken(tmp_path: Path) -> None:
    backend = TensorboardBackend()
    made = tensorboardX.SummaryWriter(str(tmp_path / "a"))
    below = SummaryWriter(str(tmp_path / "a" / "loss_train"))
    beside = SummaryWriter(str(tmp_path / "ab"))
    assert taken(backend) == {}
    for writer, number in ((made, 5), (made, 512), (below, 512), (beside, 7)):
        writer.add_scalar("loss", 1.0, number)
    found = backend.take_numbers(run_in(tmp_path / "a"))
    assert found == {5: 1, 512: 2}
    assert backend.take_numbers(run_in(tmp_path / "a")) == {}
    backend.see_no_numbers()
    for writer in (made, below, beside):
        writer.close()


@pytest.mark.parametrize("kind", [SummaryWriter, tensorboardX.SummaryWriter])
def test_no_time_and_no_invalid_number_counts(tmp_path: Path, kind: type[SummaryWriter]) -> None:
    backend = TensorboardBackend()
    made = kind(str(tmp_path))
    assert taken(backend) == {}
    now = time.time()
    for number in (-1, int(now), int(now * 1e3), int(now * 1e6), int(now * 1e9), 3, 2 * 10**9):
        made.add_scalar("loss", 1.0, number)
    assert taken(backend) == {3: 1, 2 * 10**9: 1}
    for number in range(10_000):
        made.add_scalar("loss", 1.0, number)
    assert list(taken(backend)) == list(range(10_000 - 64, 10_000))
    backend.see_no_numbers()
    made.close()
