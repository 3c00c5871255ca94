"""Trackio's sink and store keep the contracts in a folder, where Trackio stores runs by default."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.stores import moved_away
from support.trackio_contract import NUMBERS, TrackioContract, TrackioStoreContract
from support.trackio_server import times_of

from memlog.sink import Connection
from memlog.testing import Time
from memlog_trackio.addresses import in_folder

pytestmark = pytest.mark.integration


class TestTrackioInAFolder(TrackioContract):
    # For a sink, it is the failure of a call that was executed. `TestTheSinkInMemory` runs the test.
    test_an_odd_error_of_any_call_loses_nothing = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _folder(self, disk: Path) -> None:
        self.disk = disk
        folder = disk / "user" / "cache" / "huggingface" / "trackio"
        self.connection = Connection(in_folder(folder), {"TRACKIO_DIR": str(folder)})
        self.project = f"p{next(NUMBERS)}"

    def ask(self, question: str, **arguments: Any) -> Any:
        from trackio import server

        return getattr(server, question)(**arguments)

    def times(self, run_id: str) -> Sequence[Time]:
        return times_of(self.logs(run_id))

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.disk)


class TestTheStoreInAFolder(TrackioStoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, disk: Path) -> None:
        self.disk = disk
        folder = disk / "user" / "cache" / "huggingface" / "trackio"
        self.connection = Connection(in_folder(folder), {"TRACKIO_DIR": str(folder)})

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.disk)
