"""The journal's own store passes the contract tests of stores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import pytest
from support.stores import moved_away

from memlog._internal.diagnostics import Diagnostics
from memlog.artifacts.pulling import JournalStore
from memlog.events import End
from memlog.journal import JournalWriter, RunDirectory, new_run
from memlog.journal.artifacts import keep
from memlog.sink import ArtifactStore
from memlog.testing import ArtifactStoreContract


class TestTheJournalsStore(ArtifactStoreContract):
    @pytest.fixture(autouse=True)
    def _run(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.root = tmp_path_factory.mktemp("runs")
        self.run: RunDirectory = new_run(self.root)

    def open_store(self) -> ArtifactStore:
        return JournalStore(self.run)

    def run_with(self, files: Mapping[tuple[str, str], bytes]) -> str:
        journal = JournalWriter(
            self.run.path, run=self.run.id, role="trainer", begun_us=1, diagnostics=Diagnostics()
        )
        for (kind, name), data in files.items():
            source = self.root.with_name(f"source-{name}")
            source.write_bytes(data)
            journal.append(keep(self.run, source, name, kind))
        journal.append(End(2, "finished"))
        journal.close()
        return self.run.id

    def unknown_run(self) -> str:
        return "nobody"

    def down(self) -> AbstractContextManager[None]:
        return moved_away(self.root)
