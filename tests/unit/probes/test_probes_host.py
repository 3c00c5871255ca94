from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog._internal.terminal import MIB
from memlog.probes.process import HostProbe, HostReading, _max_rss, _PortableMemory

PAGE = os.sysconf("SC_PAGE_SIZE")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def health() -> Diagnostics:
    return Diagnostics()


def fake_proc(folder: Path, status: str) -> Path:
    """Files in the kernel's form; the resident set is 50 pages."""
    (folder / "self").mkdir()
    (folder / "self" / "statm").write_text("900 50 20 1 0 30 0\n")
    (folder / "self" / "status").write_text(f"Name:\tVmHWM:\nUmask:\t0022\n{status}Threads:\t1\n")
    return folder


def test_reads_this_process(health: Diagnostics) -> None:
    reading = HostProbe(health).read()

    assert MIB < reading.rss <= reading.rss_peak
    assert reading.rss_peak_source == "watermark"
    assert not health.faults


def test_two_ways_to_read_agree(health: Diagnostics) -> None:
    rss, watermark = _PortableMemory().read()
    reading = HostProbe(health).read()

    assert reading.rss == pytest.approx(rss, abs=16 * MIB)
    assert watermark > rss / 2


@linux
def test_a_watermark_above_the_process_own_is_not_believed(
    health: Diagnostics, tmp_path: Path
) -> None:
    own = _max_rss() // 2 // 1024 * 1024
    proc = fake_proc(tmp_path, f"VmHWM:\t{own // 1024:8} kB\n")

    assert HostProbe(health, proc=proc).read().rss_peak == own


@linux
def test_an_inherited_watermark_that_cannot_be_checked_is_unknown(
    health: Diagnostics, tmp_path: Path
) -> None:
    reading = HostProbe(health, proc=fake_proc(tmp_path, "")).read()

    assert reading[:3] == (50 * os.sysconf("SC_PAGE_SIZE"), None, None)


@linux
def test_the_resident_set_is_split_into_anonymous_and_shared_memory_and_files(
    health: Diagnostics, tmp_path: Path
) -> None:
    probe = HostProbe(health, proc=fake_proc(tmp_path, "RssShmem:\t      16 kB\n"))
    assert (probe.rss_anon, probe.rss_shared) == (None, None)
    probe.read()
    page = os.sysconf("SC_PAGE_SIZE")
    assert probe.rss_anon == 30 * page
    assert probe.rss_shared == 16 * 1024
    assert probe.rss_file == 20 * page - 16 * 1024


@linux
def test_the_watermark_never_falls_by_itself(health: Diagnostics, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "VmHWM:\t    2000 kB\n")
    probe = HostProbe(health, proc=proc)
    assert probe.read().rss_peak == 2000 * 1024

    (proc / "self" / "status").write_text("Name:\tx\nVmHWM:\t    1990 kB\n")

    assert probe.read()[1:3] == (2000 * 1024, "watermark")


@linux
def test_without_proc_everything_is_unknown_and_counted(
    health: Diagnostics, tmp_path: Path
) -> None:
    probe = HostProbe(health, proc=tmp_path)

    assert probe.read() == HostReading()
    assert sum(health.faults.values()) == 1


def open_figures() -> int:
    """Descriptors of memory figures alone: a child of pytest's may lose others of its parent's."""
    paths = (path.resolve().name for path in Path("/proc/self/fd").iterdir())
    return sum(1 for name in paths if name in ("statm", "status"))


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@linux
def test_close_releases_the_descriptors(health: Diagnostics, tmp_path: Path) -> None:
    before = open_descriptors()
    probe = HostProbe(health)
    assert open_descriptors() == before + 2
    probe.close()
    probe.close()
    assert open_descriptors() == before
    assert probe.read() == HostReading()
    HostProbe(health, proc=fake_proc(tmp_path, "")).close()
    assert open_descriptors() == before
    assert not health.faults


@linux
def test_a_reading_of_unchanged_figures_is_the_one_before(
    health: Diagnostics, tmp_path: Path
) -> None:
    proc = fake_proc(tmp_path, "VmHWM:\t90000000 kB\nRssShmem:\t0 kB\n")
    statm, probe = proc / "self" / "statm", HostProbe(health, proc=proc)
    first = probe.read()
    assert probe.read() is first
    statm.write_text("901 50 20 1 0 31 0\n")
    second = probe.read()
    assert (first.spaces[0], second.spaces[0]) == (30 * PAGE, 31 * PAGE)
    statm.write_text("901 51 20 1 0 31 0\n")
    assert probe.read().rss == second.rss + PAGE
    statm.write_text("900 50 20 1 0 30 0\n")
    assert probe.read() == first


@linux
def test_a_new_peak_is_exact_once(health: Diagnostics) -> None:
    """The peak rises beside an equal resident set if a step frees what it took."""
    probe = HostProbe(health)
    probe.read()
    room = _max_rss() - probe.read().rss
    bytearray(room + 64 * MIB)
    raised, again = probe.read(), probe.read()
    assert (raised.rss_peak_source, again.rss_peak_source) == ("exact", "watermark")
    assert again.rss_peak == raised.rss_peak


@linux
def test_never_closes_a_file_that_reuses_its_descriptor(
    health: Diagnostics, tmp_path: Path
) -> None:
    probe = HostProbe(health)
    number = probe._memory.statm  # type: ignore[union-attr]
    with (tmp_path / "the user's").open("w") as users:
        os.dup2(users.fileno(), number)
    probe.close()
    os.write(number, b"mine")
    os.close(number)
    assert (tmp_path / "the user's").read_text() == "mine"


@linux
def test_a_forked_child_reads_its_own_and_keeps_no_more(health: Diagnostics) -> None:
    probe = HostProbe(health)
    before = open_figures()
    child = os.fork()
    if child == 0:
        right = probe.read().rss is not None and open_figures() == before
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    probe.close()
