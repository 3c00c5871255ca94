"""Simulations on disk: PhiFlow computes them once, one ``.npy`` file each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyco.config import Config


def simulation_files(config: Config) -> list[Path]:
    """Return the simulations' files of ``[frame, channel, x, y]``; create them if any is missing."""
    files = [config.folder / f"sim_{number:06d}.npy" for number in range(config.data.n_sims)]
    if not all(file.exists() for file in files):
        print(f"Simulating {len(files)} x {config.data.n_frames} frames into {config.folder}")
        config.folder.mkdir(parents=True, exist_ok=True)
        for file, frames in zip(files, _simulate(config), strict=True):
            _save(file, frames)
    return files


def _simulate(config: Config) -> NDArray[np.float32]:
    """Compute all simulations at once, as ``[simulation, frame, channel, x, y]``."""
    from hyco.equations import random_field, time_step, to_numpy  # noqa: PLC0415 - takes 2 s

    step = time_step(config.equation)
    [coefficient] = config.equation.pde_params.values()
    field = random_field(config.equation, config.data.resolution, config.data.n_sims)
    frames = [to_numpy(field)]
    for _ in range(config.data.n_frames - 1):
        field = step(field, coefficient)
        frames.append(to_numpy(field))
    return np.stack(frames, axis=1)


def _save(file: Path, frames: NDArray[np.float32]) -> None:
    """Write a file under another name and rename it, so that a parallel run never reads a partial file."""
    beginning = file.with_suffix(".part")
    with beginning.open("wb") as stream:
        np.save(stream, frames)
    beginning.replace(file)
