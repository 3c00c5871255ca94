"""The contracts hold for the doubles that tests use as trackers."""

import pytest
from support.in_memory import InMemory, StoreInMemory
from support.sinks import ListTracker


class TestTheSinkInMemory(InMemory):
    @pytest.fixture(autouse=True)
    def _tracker(self) -> None:
        self.tracker = ListTracker()


class TestTheStoreInMemory(StoreInMemory):
    @pytest.fixture(autouse=True)
    def _tracker(self) -> None:
        self.tracker = ListTracker()
