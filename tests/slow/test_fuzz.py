"""Many more damaged snapshots and flame graphs than a unit test has time for."""

import contextlib
import json
import pickle
from pathlib import Path

import pytest
from support.flamegraphs import document
from support.pickles import damaged, imported, malicious

from memlog.artifacts.server import check_flamegraph, is_openable
from memlog.artifacts.snapshots import parse_snapshot
from memlog.errors import SnapshotError, UnopenableFileError

SNAPSHOT = {
    "segments": [{"device": 0, "blocks": [{"size": 512, "state": "inactive"}]}],
    "device_traces": [[{"action": "alloc", "addr": 1 << 40, "size": 4, "frames": []}] * 3],
}

pytestmark = pytest.mark.slow


def test_five_thousand_pickles_import_nothing() -> None:
    plain = [pickle.dumps(SNAPSHOT, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    spoilt = [
        (malicious, damaged)[seed % 2](plain[seed % len(plain)], seed) for seed in range(5_000)
    ]
    with imported() as names:
        for content in spoilt:
            with contextlib.suppress(SnapshotError):
                parse_snapshot(content)
    assert names == []


def test_three_thousand_damaged_flame_graphs_are_shown_or_refused(tmp_path: Path) -> None:
    honest = json.dumps(document()).encode()
    for seed in range(3_000):
        content = damaged(honest, seed)
        with contextlib.suppress(UnopenableFileError):
            check_flamegraph(content)
        if seed % 100 == 0:
            (tmp_path / "graph").write_bytes(content)
            is_openable(tmp_path / "graph")
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]
