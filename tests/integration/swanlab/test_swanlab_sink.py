"""SwanLab's integration in a user's program, after a crash, and in front of SwanLab's own upload."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import child
from swanlab.proto.swanlab.grpc.core.v1.sync_pb2 import DeliverSyncStartRequest
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.proto.swanlab.settings.core.v1.core_pb2 import CoreSettings
from swanlab.sdk.internal.core_python.store import DataStoreReader
from swanlab.sdk.internal.core_python.sync import CoreSyncPython

from memlog.errors import RunRefusedError
from memlog.sink import Connection, Point, Target
from memlog_swanlab import backend
from memlog_swanlab.backend import address_of, parts_of

pytestmark = pytest.mark.integration

JOINED = """
    import swanlab

    import memlog

    session = memlog.init("swanlab", dir="runs", finish_timeout=60)
    settings = swanlab.Settings(probe=swanlab.Settings.Probe(hardware=False, monitor=False, git=False))
    run = swanlab.init(mode="offline", project="mine", workspace="team", settings=settings)
    for step in range(20):
        session.step()
        swanlab.log({"loss": step / 2}, step=step)
    memlog.finish()
    print("id", run.id, flush=True)
    swanlab.finish()
"""
OWN = """
    import memlog

    session = memlog.init("swanlab", dir="runs", project="mine", finish_timeout=60)
    for step in range(20):
        session.step()
    memlog.finish()
"""


def records_in(folder: Path) -> list[Record]:
    (file,) = folder.glob("run-*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = [Record.FromString(data) for data in reader]
    reader.close()
    return records


def steps_of(records: list[Record], key: str = "memory/host/rss_mib") -> list[int]:
    return [record.scalar.step for record in records if record.scalar.key == key]


def target(disk: Path, name: str = "run") -> Target:
    return Target(name, None, connection=Connection(address_of(disk / "swanlog")))


def points(count: int) -> list[Point]:
    return [Point("memory/host/rss_mib", 1.0, "step", step, 0) for step in range(count)]


def test_memory_is_beside_the_users_values_under_the_same_id(tmp_path: Path) -> None:
    printed, errors = child.start(JOINED, tmp_path).communicate(timeout=240)
    (run_id,) = [line.split()[1] for line in printed.splitlines() if line.startswith("id ")]
    users, own = sorted(tmp_path.glob("swanlog/run-*"), key=lambda folder: len(folder.name))
    assert steps_of(records_in(users), "loss") == list(range(20))
    (upload,) = [line for line in errors.splitlines() if "memlog: swanlab run" in line]
    assert f"`swanlab sync --id {run_id} {tmp_path}/swanlog/run-*-{run_id}-*`" in upload
    assert list(tmp_path.glob(f"swanlog/run-*-{run_id}-*")) == [own]
    records = records_in(own)
    start = records[0].start
    assert (start.id, start.project, start.workspace) == (run_id, "mine", "team")
    assert steps_of(records) == list(range(20))
    # `swanlab sync` would set the end of the user's run from such a record.
    assert not [record for record in records if record.HasField("finish")]


def test_without_a_run_memlog_opens_one(tmp_path: Path) -> None:
    child.run(OWN, tmp_path)
    (folder,) = tmp_path.glob("swanlog/run-*")
    records = records_in(folder)
    assert records[0].start.project == "mine"
    assert steps_of(records) == list(range(20))
    assert records[-1].HasField("finish")


def test_half_a_record_of_a_killed_process_is_written_again(tmp_path: Path) -> None:
    backend.open_sink(target(tmp_path)).log_points(points(50))
    (file,) = tmp_path.glob("swanlog/run-*/run-*.swanlab")
    whole = file.read_bytes()
    for length in (0, 3, 7, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        backend.open_sink(target(tmp_path)).log_points(points(60))
        records = records_in(file.parent)
        assert records[0].HasField("start")
        assert steps_of(records) == list(range(60))


def test_a_folder_that_the_user_deleted_is_not_made_again(tmp_path: Path) -> None:
    run = backend.open_sink(target(tmp_path)).open()
    (tmp_path / "swanlog").rename(tmp_path / "old")
    again = backend.open_sink(Target("run", None, opened=run))
    with pytest.raises(RunRefusedError, match="is deleted"):
        again.open()


def test_swanlabs_upload_reads_the_folder(tmp_path: Path) -> None:
    sink = backend.open_sink(target(tmp_path))
    run = sink.open()
    sink.log_points(points(3))
    assert run.link is not None
    assert run.link.startswith(f"swanlab sync --id {run.run_id} ")
    settings = CoreSettings(run_id=run.run_id, run_dir=run.link.rpartition(" ")[2])
    sync = CoreSyncPython()
    answer = sync.deliver_sync_start(DeliverSyncStartRequest(core_settings=settings))
    assert answer.success, answer.message
    sync._reader.close()


@pytest.mark.parametrize("folder", ["/a b/ü#?&", "/swanlog"])
def test_an_address_names_its_parts(folder: str) -> None:
    address = address_of(Path(folder), "my project", "team/x")
    assert parts_of(address) == (Path(folder), {"project": "my project", "workspace": "team/x"})
