"""TensorBoard's sink keeps the contract of all sinks. TensorBoard's own reader reads the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pytest
from msgspec.structs import replace
from support.event_files import events_in, texts_in
from support.stores import moved_away
from torch.utils.tensorboard import SummaryWriter

from memlog.events import Status
from memlog.sink import Connection, Sink, Target, TrackerRun
from memlog.testing import Row, Shown, SinkContract, Time
from memlog_tensorboard import TensorboardBackend

pytestmark = pytest.mark.integration

USERS = "loss"


class TestTensorboard(SinkContract):
    cannot_show: ClassVar[Mapping[Shown, str]] = {
        "files": "TensorBoard stores no files: a text says where each one is",
    }

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> Iterator[None]:
        self.disk = tmp_path / "disk"
        self.disk.mkdir()
        self.backend = TensorboardBackend()
        self.writers: list[SummaryWriter] = []
        yield
        for writer in self.writers:
            writer.close()

    def open_sink(self, target: Target) -> Sink:
        connection = Connection(str(self.disk / "runs"))
        return self.backend.open_sink(replace(target, connection=connection))

    def user_run(self) -> TrackerRun:
        writer = SummaryWriter(str(self.disk / "runs" / "users"))
        writer.add_scalar(USERS, 1.0, 0)
        self.writers.append(writer)
        run = self.backend.active_run()
        assert run is not None
        return run

    def stored(self, value: float) -> float:
        return float(np.float32(value))

    def rows(self, run_id: str) -> Sequence[Row]:
        reader = events_in(run_id)
        return [
            (tag, event.step, event.value)
            for tag in reader.Tags()["scalars"]
            if tag != USERS
            for event in reader.Scalars(tag)
        ]

    def times(self, run_id: str) -> Sequence[Time]:
        reader = events_in(run_id)
        return [
            (tag, event.step, round(event.wall_time * 1e6) // 1000)
            for tag in reader.Tags()["scalars"]
            if tag != USERS
            for event in reader.Scalars(tag)
        ]

    def parameters(self, run_id: str) -> Mapping[str, str]:
        cells = [cell for text in texts_in(run_id, "memlog/parameters") for cell in text[1]]
        return dict(zip(cells[::2], cells[1::2], strict=True))

    def alerts(self, run_id: str) -> Sequence[str]:
        texts = [text for _, (text,) in texts_in(run_id, "memlog/alerts/")]
        return [text.partition(": ")[2].partition("**")[0] for text in texts]

    def status(self, run_id: str) -> Status | None:
        texts = [text for _, (text,) in sorted(texts_in(run_id, "memlog/status"))]
        return next((status for status in get_args(Status) if texts[-1:] == [status]), None)

    def ended_ms(self, run_id: str) -> int | None:
        # A run that goes on after a restart has an end of each attempt.
        return max(round(at * 1000) for at, _ in texts_in(run_id, "memlog/status"))

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.disk)
