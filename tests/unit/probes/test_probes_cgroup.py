from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from memlog.probes.machine import CgroupReading, read_cgroup, read_file_pages

GIB = 1024**3
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000
PID = 4321


class Machine:
    """Real files in the form of ``/proc`` and ``/sys/fs/cgroup``."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.proc = folder / "proc"
        self.root.mkdir()
        (self.proc / str(PID)).mkdir(parents=True)

    def belongs(self, *lines: str) -> None:
        (self.proc / str(PID) / "cgroup").write_text("\n".join(lines) + "\n")

    def group(self, path: str, **files: object) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"memory.{name}").write_text(f"{content}\n")

    def read(self) -> CgroupReading:
        return read_cgroup(PID, root=self.root, proc=self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_v2_the_smallest_limit_up_the_path_counts(machine: Machine) -> None:
    machine.belongs("0::/user.slice/job.scope")
    machine.group("", current=90 * GIB)
    machine.group("user.slice", current=9 * GIB, max=16 * GIB)
    machine.group("user.slice/job.scope", current=3 * GIB, max=32 * GIB)
    machine.group("user.slice/other.scope", current=GIB, max=GIB)

    assert machine.read() == CgroupReading(3 * GIB, 16 * GIB)


def test_v2_inside_a_container_the_root_is_its_own_group(machine: Machine) -> None:
    machine.belongs("0::/")
    machine.group("", current=2 * GIB, max=8 * GIB)

    assert machine.read() == CgroupReading(2 * GIB, 8 * GIB)


def test_v2_a_group_without_the_memory_controller_is_accounted_above(machine: Machine) -> None:
    machine.belongs("0::/slice/leaf")
    machine.group("slice", current=5 * GIB, max="max")
    machine.group("slice/leaf")

    assert machine.read() == CgroupReading(5 * GIB, None)


def test_a_path_out_of_the_namespace_stays_inside(machine: Machine) -> None:
    machine.belongs("0::/../../elsewhere")
    machine.group("", current=2 * GIB, max=8 * GIB)
    machine.group("../elsewhere", current=1, max=1)

    assert machine.read() == CgroupReading(2 * GIB, 8 * GIB)


def test_v1_takes_the_tightest_limit_on_the_path(machine: Machine) -> None:
    machine.belongs("5:cpu,cpuacct:/job", "4:memory:/batch/job", "1:name=systemd:/job")
    machine.group("memory", usage_in_bytes=90 * GIB, limit_in_bytes=NO_LIMIT_V1)
    machine.group("memory/batch", usage_in_bytes=9 * GIB, limit_in_bytes=10 * GIB)
    machine.group("memory/batch/job", usage_in_bytes=4 * GIB, limit_in_bytes=NO_LIMIT_V1)

    assert machine.read() == CgroupReading(4 * GIB, 10 * GIB)


def test_v1_inside_a_container_that_sees_the_hosts_path(machine: Machine) -> None:
    machine.belongs("4:memory:/docker/0123abcd", "0::/docker/0123abcd")
    machine.group("memory", usage_in_bytes=2 * GIB, limit_in_bytes=8 * GIB)

    assert machine.read() == CgroupReading(2 * GIB, 8 * GIB)


def test_both_versions_mounted_memory_belongs_to_the_one_that_names_it(machine: Machine) -> None:
    machine.belongs("4:memory:/job", "0::/other")
    machine.group("memory/job", usage_in_bytes=4 * GIB, limit_in_bytes=6 * GIB)
    machine.group("other", current=GIB, max=GIB)

    assert machine.read() == CgroupReading(4 * GIB, 6 * GIB)


def test_a_colon_in_a_path_belongs_to_it(machine: Machine) -> None:
    machine.belongs("0::/pod:uid")
    machine.group("pod:uid", current=GIB, max=2 * GIB)

    assert machine.read() == CgroupReading(GIB, 2 * GIB)


@pytest.mark.parametrize("lines", [("1:cpu:/job",), ("",), ("0::/gone",)])
def test_what_is_not_there_is_unknown(machine: Machine, lines: tuple[str, ...]) -> None:
    if lines != ("",):
        machine.belongs(*lines)

    assert machine.read() == CgroupReading(None, None)


def test_reads_this_very_process() -> None:
    reading = read_cgroup(os.getpid())

    assert reading.used is None or reading.used > 0
    assert reading.limit is None or 0 < reading.limit < 2**60


def test_pages_of_files_are_those_of_the_nearest_group(machine: Machine) -> None:
    machine.belongs("0::/job")
    machine.group("", stat="anon 1\nactive_file 70\ninactive_file 7")
    machine.group("job", stat="anon 1\nfile 900\nactive_file 300\ninactive_file 40\nshmem 560")
    read = partial(read_file_pages, PID, root=machine.root, proc=machine.proc)

    assert read() == 340
    machine.group("job", stat="anon 1")
    assert read() is None
