"""A descriptor whose number may be given to another file."""

import fcntl
import os
from pathlib import Path

from memlog._internal.processes import Descriptor


def opened(path: Path) -> Descriptor:
    return Descriptor(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_a_number_that_is_another_files_now_is_left_alone(tmp_path: Path) -> None:
    descriptor = opened(tmp_path / "a")
    number = descriptor.number
    with (tmp_path / "b").open("wb", buffering=0) as other:
        os.dup2(other.fileno(), number)
        assert descriptor.status() is None
        descriptor.close()
        del descriptor
        os.write(number, b"still open")
        os.close(number)
    assert (tmp_path / "b").read_bytes() == b"still open"


def test_a_forgotten_descriptor_is_closed_with_its_owner(tmp_path: Path) -> None:
    descriptor = opened(tmp_path / "a")
    number = descriptor.number
    del descriptor
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return
    raise AssertionError("it is open")
