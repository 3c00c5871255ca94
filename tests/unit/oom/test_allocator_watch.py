"""The watch of failed allocations asks torch once a process to attach it."""

from pathlib import Path
from typing import Any

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog.journal import new_run
from memlog.oom import observer
from memlog.oom.observer import AllocatorWatch

torch: Any = pytest.importorskip("torch")


def test_many_sessions_leave_one_call_in_torchs_queue(tmp_path: Path) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("torch has no queue once CUDA is initialised")
    for _ in range(3):
        watch = AllocatorWatch(
            lambda _: None, lambda: None, Diagnostics(), new_run(tmp_path), lambda: False
        )
        watch.begin()
        watch.stop()
    calls = [call for call, _ in torch.cuda._queued_calls]
    assert calls.count(observer._attach_current) == 1
