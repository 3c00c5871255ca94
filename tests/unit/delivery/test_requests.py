"""Requests of the helper process, in memory that both processes map."""

from pathlib import Path

import msgspec
import pytest

from memlog.delivery.helper.protocol import (
    SIZE,
    RequestReader,
    RequestWriter,
    writer_for,
)


def taken(reader: RequestReader) -> list[tuple[str, object]]:
    return [(one.kind, msgspec.json.decode(one.body)) for one in reader.read()]


@pytest.fixture
def ends() -> tuple[RequestReader, RequestWriter]:
    reader = RequestReader(lambda: None)
    return reader, RequestWriter(reader.descriptor)


def test_requests_arrive_once_and_in_order(ends: tuple[RequestReader, RequestWriter]) -> None:
    reader, writer = ends
    assert not reader.pending
    writer.write("growth", {"step": 3})
    writer.write("collect")
    assert reader.pending
    assert taken(reader) == [("growth", {"step": 3}), ("collect", None)]
    assert not reader.pending
    assert taken(reader) == []


def test_the_ring_is_used_again_and_a_full_one_loses_nothing(
    ends: tuple[RequestReader, RequestWriter],
) -> None:
    reader, writer = ends
    text = "x" * 10_000
    for number in range(40):  # 400 kB: six times the memory
        writer.write("alert", [number, text])
    found = []
    while reader.pending:
        found += taken(reader)
        writer.flush()
    assert found == [("alert", [number, text]) for number in range(40)]
    writer.write("alert", "x" * SIZE)  # larger than all: it is left out
    writer.write("alert", 1)
    assert taken(reader) == [("alert", 1)]


def test_another_helper_goes_on_where_the_first_one_stopped(
    ends: tuple[RequestReader, RequestWriter],
) -> None:
    reader, writer = ends
    writer.write("alert", 1)
    another = writer_for(reader.descriptor)
    another.write("alert", 2)
    assert taken(reader) == [("alert", 1), ("alert", 2)]
    reader.tell(1)
    assert (writer.state, another.state) == (1, 1)


def test_a_file_of_the_program_is_never_written_to(tmp_path: Path) -> None:
    """The program has closed the memory's descriptor, and has got its number for a file."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * SIZE)
    with path.open("r+b") as file:
        writer_for(file.fileno()).write("alert", 1)
    assert path.read_bytes() == b"a" * SIZE


def test_without_memory_nothing_is_asked_for() -> None:
    writer = writer_for(None)
    writer.write("alert", 1)
    writer.flush()
