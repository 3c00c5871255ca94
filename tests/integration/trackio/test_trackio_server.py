"""Trackio's sink and store keep the contracts with Trackio's own server, on loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.trackio_contract import NUMBERS, TrackioContract, TrackioStoreContract
from support.trackio_server import TOKEN, TrackioServer

from memlog.sink import Connection
from memlog.testing import Shown

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@contextmanager
def stopped(server: TrackioServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


class TestTrackiosServer(TrackioContract):
    cannot_show: ClassVar[Mapping[Shown, str]] = {
        "times": "Trackio's server gives each row the time at which it arrives",
    }

    # The tests with a folder cover the same calls of the same sink in a third of the time.
    test_a_refusal_of_any_call_costs_that_alone = None  # type: ignore[assignment]
    test_an_odd_error_of_any_call_loses_nothing = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _server(self, disk: Path, server: TrackioServer) -> None:  # noqa: ARG002 - for the client's own files
        self.server = server
        self.connection = Connection(server.url, {"TRACKIO_WRITE_TOKEN": TOKEN})
        self.project = f"p{next(NUMBERS)}"

    def ask(self, question: str, **arguments: Any) -> Any:
        return self.server.ask(question, **arguments)

    def down(self) -> AbstractContextManager[None]:
        return stopped(self.server)


class TestTheStoreOnAServer(TrackioStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, disk: Path, server: TrackioServer) -> None:  # noqa: ARG002 - for the client's own files
        self.server = server
        self.connection = Connection(server.url, {"TRACKIO_WRITE_TOKEN": TOKEN})

    def down(self) -> AbstractContextManager[None]:
        return stopped(self.server)
