"""HYCO's data set: cache of simulations, copies of windows, and shuffling in groups."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from hyco.dataset import GroupedSampler, Rollouts, SimulationCache

FRAMES = 6


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four simulations; every frame holds ten times its simulation's number plus its own."""
    for number in range(4):
        frames = 10.0 * number + np.arange(FRAMES).reshape(FRAMES, 1, 1, 1)
        np.save(tmp_path / f"{number}.npy", np.broadcast_to(frames, (FRAMES, 2, 3, 3)))
    return sorted(tmp_path.glob("*.npy"))


@pytest.mark.seed(73, 129)
def test_the_simulations_that_were_used_last_are_held(files: list[Path]) -> None:
    cache = SimulationCache(files, capacity=2)
    for number in (0, 1, 0, 2, 0, 1):
        assert cache.get(number)[0, 0, 0, 0] == 10 * number
    assert (cache.loads, cache.hits) == (4, 2)
    assert cache.held_bytes == 2 * FRAMES * 2 * 3 * 3 * 8


def test_without_a_limit_all_are_loaded_at_once(files: list[Path]) -> None:
    cache = SimulationCache(files, capacity=None)
    assert cache.loads == 4
    cache.get(3)
    assert (cache.loads, cache.hits) == (4, 1)


@pytest.mark.seed(141)
def test_windows_hold_no_simulation_that_left_the_cache(files: list[Path]) -> None:
    rollouts = Rollouts(files, steps=2, max_cached_sims=1)
    first = weakref.ref(rollouts.cache.get(0).untyped_storage())
    frame, following = rollouts[1]
    assert frame[0, 0, 0] == 1
    assert following[:, 0, 0, 0].tolist() == [2, 3]
    rollouts[4]
    gc.collect()
    assert first() is None
    assert frame[0, 0, 0] == 1


@pytest.mark.parametrize(("sliding", "windows"), [(True, FRAMES - 2), (False, 1)])
@pytest.mark.seed(129)
def test_every_window_is_drawn_once_and_every_simulation_loaded_once(
    sliding: bool, windows: int, files: list[Path]
) -> None:
    rollouts = Rollouts(files, 2, max_cached_sims=2, sliding_window=sliding)
    sampler = GroupedSampler(rollouts, 2, torch.Generator().manual_seed(1))
    drawn = list(sampler)
    assert sorted(drawn) == list(range(4 * windows)) == list(range(len(sampler)))
    for index in drawn:
        rollouts[index]
    assert rollouts.cache.loads == 4
    if sliding:
        assert drawn != sorted(drawn)
        assert list(sampler) != drawn  # another order in the next epoch


@pytest.mark.parametrize(("gpu", "wanted"), [(True, True), (True, False), (False, True)])
@pytest.mark.seed(130)
def test_batches_are_pinned_where_there_is_a_gpu(
    gpu: bool, wanted: bool, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the loader's setting is checked, because pinning needs the GPU."""
    from hyco import synthetic
    from hyco.config import Config, Data, Equation, SyntheticParams

    data = Data("none", 3, len(files), FRAMES, max_cached_sims=2, pin_memory=wanted)
    equation = Equation("burgers", 0.1, 1.0, {"nu": 0.1})
    config = Config("synthetic", data, equation, None, None, None)
    params = SyntheticParams(
        epochs=1, num_predict_steps=2, train_sim=[], learning_rate=0.1, batch_size=2
    )
    monkeypatch.setattr(synthetic, "simulation_files", lambda _: files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert synthetic._loader(config, params).pin_memory is (gpu and wanted)
