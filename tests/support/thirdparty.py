"""A third party's integration, installed for real: found through entry points like any other."""

from pathlib import Path

import pytest

from memlog.sink import ArtifactStore, Connection, Sink, Target, TrackerRun
from support.sinks import ListTracker
from support.stores import DictStore

_ENTRY_POINTS = """\
[memlog.sinks]
list = support.thirdparty:backend
clientless = support.thirdparty:clientless
"""


class ListBackend:
    name = "list"
    extra = "list"

    def __init__(self, requires: str) -> None:
        self.requires = requires
        self.tracker = ListTracker()
        self.environment: dict[str, str] = {}
        self.store: ArtifactStore = DictStore({})
        self.connected: list[Connection] = []

    def active_run(self) -> TrackerRun | None:
        return None

    def connection(self) -> Connection:
        return Connection(environment=self.environment)

    def open_sink(self, target: Target) -> Sink:
        return self.tracker.open_sink(target)

    def open_store(self, connection: Connection) -> ArtifactStore:
        self.connected.append(connection)
        return self.store


backend = ListBackend("json")
clientless = ListBackend("a_client_that_nobody_installed")


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> ListBackend:
    """Make ``site`` a folder of installed packages with this integration alone."""
    metadata = site / "list_for_memlog-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: list-for-memlog\nVersion: 1.0\n"
        "Provides-Extra: list\nRequires-Dist: list-client>=2; extra == 'list'\n"
    )
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.syspath_prepend(site)
    backend.tracker, backend.environment, backend.connected = ListTracker(), {}, []
    return backend
