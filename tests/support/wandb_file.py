"""Reader of W&B's own file of an offline run (``run-*.wandb``), row by row.

The file is a log in LevelDB's framing (blocks of 32 KiB; each piece has a checksum, a length and a kind:
whole, first, middle, last) of protobuf records, behind a header of seven bytes.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_MAGIC = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

Row = dict[str, Any]


@dataclass
class WandbFile:
    run_id: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    rows: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    metrics: dict[str, Row] = field(default_factory=dict)
    alerts: list[Row] = field(default_factory=list)
    artifacts: list[Row] = field(default_factory=list)
    exit_code: int | None = None

    def users_rows(self) -> list[Row]:
        """Rows as the user wrote them, without memlog's keys and without W&B's time keys."""
        cleaned = ({k: v for k, v in row.items() if is_users(k)} for row in self.rows)
        return [row for row in cleaned if set(row) - {"_step"}]

    def memlogs_rows(self) -> list[Row]:
        """Return the rows that have values of memlog's, each with these values only."""
        cleaned = ({k: v for k, v in row.items() if is_memlogs(k)} for row in self.rows)
        return [row for row in cleaned if row]


def is_memlogs(key: str) -> bool:
    return key.startswith(("memlog/", "memory/"))


def is_users(key: str) -> bool:
    return not is_memlogs(key) and key not in ("_timestamp", "_runtime")


def find_runs(directory: Path) -> list[Path]:
    """The files of every run below a folder, the oldest first."""
    found = directory.glob("**/*run-*/run-*.wandb")
    return sorted({path.resolve() for path in found}, key=lambda path: path.parent.name)


def read_only_run(directory: Path) -> WandbFile:
    (path,) = find_runs(directory)
    return read_run(path)


def read_run(path: Path) -> WandbFile:
    """Read a run that has ended."""
    from wandb.proto import wandb_internal_pb2

    run = WandbFile()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        _take(run, record)
    assert run.exit_code is not None, f"{path} has no end"
    return run


def _records(data: bytes) -> Iterator[bytes]:
    assert data[: len(_MAGIC)] == _MAGIC, "not W&B's file"
    at, parts = len(_MAGIC), b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        checksum, length, kind = _HEADER.unpack_from(data, at)
        piece = data[at + _HEADER.size : at + _HEADER.size + length]
        assert len(piece) == length, "the file ends in the middle of a record"
        assert zlib.crc32(piece, zlib.crc32(bytes([kind]))) == checksum, "a damaged record"
        at += _HEADER.size + length
        parts = piece if kind in (_WHOLE, _FIRST) else parts + piece
        if kind in (_WHOLE, _LAST):
            yield parts


def _take(run: WandbFile, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        run.rows.append({**_items(record.history.item), "_step": record.history.step.num})
    elif kind == "summary":
        run.summary.update(_items(record.summary.update))
    elif kind == "run":
        run.run_id, run.project = record.run.run_id, record.run.project
        run.group, run.job_type = record.run.run_group, record.run.job_type
        run.config.update(_items(record.run.config.update))
    elif kind == "config":
        run.config.update(_items(record.config.update))
    elif kind == "metric":
        name = record.metric.name or record.metric.glob_name
        summary = [op.name for op, on in record.metric.summary.ListFields() if on]
        run.metrics[name] = {"step_metric": record.metric.step_metric, "summary": summary}
    elif kind == "alert":
        run.alerts.append({"title": record.alert.title, "level": record.alert.level})
    elif kind == "artifact":
        run.artifacts.append(_artifact(record.artifact))
    elif kind == "request" and record.request.HasField("log_artifact"):
        run.artifacts.append(_artifact(record.request.log_artifact.artifact))
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _items(items: Any) -> Row:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _artifact(artifact: Any) -> Row:
    files = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    return {"name": artifact.name, "type": artifact.type, "files": files}
