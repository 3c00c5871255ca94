"""Sink for one SwanLab run, as a folder of an offline run. The sink runs in a process of memlog's own.

The functions of `swanlab` itself write only one run per process, with the present time. So the sink writes
SwanLab's records with SwanLab's own writer, and reads them back with its reader.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from swanlab.proto.swanlab.metric.column.v1.column_pb2 import ColumnType
from swanlab.proto.swanlab.metric.data.v1 import data_pb2 as data
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.proto.swanlab.run.v1 import run_pb2 as runs
from swanlab.proto.swanlab.save.v1.save_pb2 import SaveRecord
from swanlab.sdk.internal.core_python.store import DataStoreReader, DataStoreWriter
from swanlab.sdk.internal.run.transforms import Text

from memlog._internal.diagnostics import Diagnostics
from memlog.errors import RunRefusedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status, now_us
from memlog.sink import Point, Resolution, Target, TrackerRun, distinct_name, valid_text, written
from memlog_swanlab.backend import address_of, parts_of

ALERTS, PARAMETERS = "memlog/alerts", "memlog/parameters"
_STATES: Mapping[Status, Any] = {
    "finished": runs.RunState.RUN_STATE_FINISHED,
    "failed": runs.RunState.RUN_STATE_CRASHED,
    "killed": runs.RunState.RUN_STATE_ABORTED,
}
_MAX_KEY, _MAX_STEP, _MAX_ID = 255, 1 << 48, 64
"""SwanLab's limits of a metric's name, of a step and of a run's id."""
_HEADER = 7
"""Bytes of a run file's header."""


class SwanlabSink:
    """A `memlog.sink.Sink` for SwanLab. Its methods raise the errors that `Sink` names.

    Each session writes a folder of its own beside the user's, under the id of the run.

    Args:
        target: The run to write to.

    Attributes:
        dropped: Number of points left out so far, by reason. The only reason is ``step``: SwanLab's steps go
            from 0 to 2^48.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000

    def __init__(self, target: Target) -> None:
        self._diagnostics = Diagnostics()
        self.dropped: Mapping[str, int] = self._diagnostics.dropped
        self._target = target
        known = target.joined or target.opened
        where = known or target.beside
        self._root, names = parts_of((where and where.uri) or target.connection.uri or "swanlog")
        self._project = names.get("project") or target.project or "memlog"
        self._workspace = names.get("workspace")
        self._run_id = known.run_id if known else _part(f"memlog-{target.id_with_beside}")
        begun = datetime.fromtimestamp((target.begun_us or 0) // 10**6, timezone.utc)
        session = _part(f"{self._run_id}-{target.memlog_run}")
        self._folder = self._root / f"run-{begun:%Y%m%d_%H%M%S}-{session}"
        self._file: _RunFile | None = None

    def probe(self) -> None:
        """Check that the folder can be written."""
        if not self._root.parent.is_dir():
            raise TrackerUnavailableError(
                f"there is no folder {self._root.parent}: mount its disk, or create it again"
            )
        if self._target.opened and not (self._target.continues or self._folder.is_dir()):
            raise RunRefusedError(f"the SwanLab folder {self._folder} is deleted")

    def open(self) -> TrackerRun:
        """Create the folder of this session, or find it."""
        self._append()
        link = f"swanlab sync --id {self._run_id} {shlex.quote(str(self._folder))}"
        address = address_of(self._root, self._project, self._workspace)
        return TrackerRun(self._run_id, address, self._target.name, link)

    def log_points(self, points: Sequence[Point]) -> None:
        """Store points, each with the time of its event. One call takes at most `max_points` points."""
        self._append(*(_scalar(point) for point in points if self._is_storable(point)))

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Store parameters that are new or have another value, as a text of JSON."""
        with self._opened() as file:
            tables = [json.loads(path.read_text("utf-8")) for path in file.texts(PARAMETERS)]
        known = {name: value for table in tables for name, value in table.items()}
        new = {name: value for name, value in parameters.items() if known.get(name) != value}
        if new:
            text = json.dumps(new, indent=1)
            self._append(self._text(PARAMETERS, len(tables), self._target.begun_us or 0, text))

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Store the new alerts as texts, at their steps. Each rule and place has its own name."""
        for alert in alerts[first_new:]:
            name = f"{ALERTS}/{alert.rule}" + (f" ({alert.where})" if alert.where else "")
            text = f"{alert.level}: {alert.title}\n\n{alert.text or alert.rule}"
            self._append(self._text(name, alert.step or 0, alert.time_us, text, alert.title))

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Store a file as ``memlog/<kind>/<name>`` of the run."""
        name = f"memlog/{artifact.kind}/{artifact.name}"
        path = self._folder / "files" / name
        with self._opened() as run_file:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, new := path.with_name(f".{path.name}.new"))
            new.replace(path)
            save = SaveRecord(name=name, source_path=str(path), target_path=str(path))
            run_file.append([Record(save=save)])

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Store the end of memlog's own run. A joined run is not ended."""
        if self._target.joined is None and status is not None:
            at, error = _time(ended_us or now_us()), "" if status == "finished" else status
            finish = runs.FinishRecord(state=_STATES[status], finished_at=at, error=error)
            self._append(Record(finish=finish))

    def _append(self, *records: Record) -> None:
        with self._opened() as file:
            file.append(records)

    @contextmanager
    def _opened(self) -> Iterator[_RunFile]:
        self.probe()
        with written("SwanLab", self._folder):
            file, self._file = self._file, None  # after an error, what is stored is read again
            if file is None:
                start = runs.StartRecord(
                    id=self._run_id,
                    project=self._project,
                    workspace=self._workspace,
                    name=valid_text(self._target.name or self._run_id),
                    resume=runs.ResumeMode.RESUME_MODE_ALLOW,
                    started_at=_time(self._target.begun_us or 0),
                )
                (self._folder / "media" / "text").mkdir(parents=True, exist_ok=True)
                path = self._folder / f"run-{_part(self._run_id)}.swanlab"
                file = _RunFile(path, Record(num=-1, start=start))
            yield file
            self._file = file

    def _text(self, key: str, step: int, time_us: int, text: str, caption: str = "") -> Record:
        made = Text(valid_text(text), caption=valid_text(caption))
        with self._opened() as file:
            value = data.MediaValue(items=[made.transform(step=step, path=file.texts_folder)])
        kind, time = ColumnType.COLUMN_TYPE_TEXT, _time(time_us)
        media = data.MediaRecord(key=_key(key), step=step, type=kind, timestamp=time, value=value)
        return Record(media=media)

    def _is_storable(self, point: Point) -> bool:
        if 0 <= point.index <= _MAX_STEP:
            return True
        self._diagnostics.drop("step", f"{point.name}: SwanLab takes no step {point.index}")
        return False


class _RunFile:
    """Run file of SwanLab, which gets each value, text, file and end once."""

    def __init__(self, path: Path, start: Record) -> None:
        self.texts_folder = path.parent / "media" / "text"
        self._path = path
        self._known: dict[tuple[object, ...], Record] = {}
        self._end = self._read() if path.exists() and path.stat().st_size >= _HEADER else 0
        self.append([start])

    def texts(self, key: str) -> list[Path]:
        """Return the files of the texts that are stored under a key."""
        media = (each.media for each in self._known.values() if each.media.key == key)
        return [self.texts_folder / each.value.items[0].filename for each in media]

    def append(self, records: Iterable[Record]) -> None:
        """Store the records that are not stored yet."""
        new = [record for record in records if self._learn(record)]
        if not new:
            return
        writer = self._writer()
        try:
            for record in new:
                record.num = record.num or len(self._known)
                record.timestamp.CopyFrom(_time(now_us()))
                writer.write(record.SerializeToString())
            writer.ensure_flushed()
            os.fsync(writer._fp.fileno())  # noqa: SLF001 - the writer's flush stops at the system
            self._end = writer._index  # noqa: SLF001 - it has no public position
        finally:
            writer.close()

    def _writer(self) -> DataStoreWriter:
        """Return SwanLab's writer at the file's end. The writer itself only makes new files."""
        writer = DataStoreWriter()
        if self._end:
            file = self._path.open("r+b")
            file.truncate(self._end)  # a killed process may have left half a record
            file.seek(self._end)
            writer._fp, writer._index = file, self._end  # noqa: SLF001 - see above
        else:
            self._path.unlink(missing_ok=True)  # it has not even a header
            writer.open(self._path)
        return writer

    def _read(self) -> int:
        """Learn the file's records, and return where the last complete one ends, in bytes."""
        reader, end = DataStoreReader(), _HEADER
        reader.open(self._path)
        for record in reader:
            self._learn(Record.FromString(record))
            end = reader._index  # noqa: SLF001 - it has no public position
        reader.close()
        return end

    def _learn(self, record: Record) -> bool:
        """Remember a record; return False if it is known."""
        kind = record.WhichOneof("record_type")
        each = getattr(record, kind)
        identity = (kind, *(getattr(each, name) for name in _IDENTITY.get(kind, ())))
        if kind == "media":
            identity += (each.value.items[0].sha256,)
        if identity in self._known:
            return False
        self._known[identity] = record if kind == "media" else _NO_RECORD
        return True


_NO_RECORD = Record()
_IDENTITY = {"scalar": ("key", "step"), "media": ("key", "step"), "save": ("name",)}
"""Fields that tell records of one kind apart. A run has one start and one end."""


def _scalar(point: Point) -> Record:
    kind, value = ColumnType.COLUMN_TYPE_SCALAR, data.ScalarValue(number=point.value)
    key, time = _key(point.name), _time(point.time_us)
    scalar = data.ScalarRecord(key=key, step=point.index, type=kind, timestamp=time, value=value)
    return Record(scalar=scalar)


def _key(name: str) -> str:
    printable = "".join(sign if sign.isprintable() else "_" for sign in name).strip(" ./")
    return distinct_name(name, printable or "_", _MAX_KEY)


def _part(run: str) -> str:
    """Return a run's id as a part of a path."""
    return distinct_name(run, run.replace("/", "_"), _MAX_ID)


def _time(time_us: int) -> Timestamp:
    return Timestamp(seconds=time_us // 10**6, nanos=time_us % 10**6 * 1000)
