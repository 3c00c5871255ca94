"""Pinned memory, as each version of torch names its figures."""

from __future__ import annotations

from typing import Any

import pytest

from memlog.probes.process import PinnedSizes, read_pinned

torch: Any = pytest.importorskip("torch")


def stat(current: int, peak: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}


@pytest.mark.parametrize(
    "names", [("reserved_bytes", "allocated_bytes"), ("allocated_bytes", "active_bytes")]
)
def test_both_names_of_the_figures_are_known(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    held, in_use = names
    stats = {held: stat(64, 128), in_use: stat(32, 96)}
    monkeypatch.setattr(torch.cuda, "host_memory_stats_as_nested_dict", lambda: stats)
    assert read_pinned() == PinnedSizes(64, 32, 128)


def test_without_cuda_and_with_an_old_torch_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert read_pinned() is None
    monkeypatch.delattr(torch.cuda, "host_memory_stats_as_nested_dict")
    assert read_pinned() is None
