"""`memlog sync` of a training whose helper process died with it."""

from pathlib import Path

import pytest
from support import child
from support.journals import GIB, MadeRun, batch
from support.ranks import only_run

from memlog._internal.distributed import Place

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
]


def test_it_combines_the_memory_of_all_ranks_once(tmp_path: Path, ready_store: str) -> None:
    for rank in range(3):
        made = MadeRun(tmp_path / "memlog_runs", f"rank{rank:04}").ranked(Place(rank, 3, "a"))
        made.write(*(batch(step, (rank + 1) * GIB) for step in range(5))).closed()
    arguments = ("sync", "rank0000", "--to", "mlflow")
    for _ in range(2):
        child.memlog(*arguments, directory=tmp_path, MLFLOW_TRACKING_URI=ready_store)
    client, tracked = only_run(ready_store)
    history = client.get_metric_history(tracked.info.run_id, "memory/ranks/host/rss_max_rank")
    assert [(point.step, point.value) for point in history] == [(step, 2) for step in range(5)]
