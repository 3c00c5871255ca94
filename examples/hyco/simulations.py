"""Simulations on disk: PhiFlow makes them once, as one ``.npy`` file each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyco.config import Config


def simulation_files(config: Config) -> list[Path]:
    """The files of ``[frame, channel, x, y]``, which are made where they are missing."""
    files = [config.folder / f"sim_{number:06d}.npy" for number in range(config.data.n_sims)]
    if not all(file.exists() for file in files):
        print(f"Simulating {len(files)} x {config.data.n_frames} frames into {config.folder}")
        config.folder.mkdir(parents=True, exist_ok=True)
        for file, frames in zip(files, _simulate(config), strict=True):
            _save(file, frames)
    return files


def _simulate(config: Config) -> NDArray[np.float32]:
    """All simulations at once, as ``[simulation, frame, channel, x, y]``."""
    from hyco.equations import random_field, time_step, to_numpy  # noqa: PLC0415 - 2 s, and once

    step = time_step(config.equation)
    [coefficient] = config.equation.pde_params.values()
    field = random_field(config.equation, config.data.resolution, config.data.n_sims)
    frames = [to_numpy(field)]
    for _ in range(config.data.n_frames - 1):
        field = step(field, coefficient)
        frames.append(to_numpy(field))
    return np.stack(frames, axis=1)


def _save(file: Path, frames: NDArray[np.float32]) -> None:
    """A command that runs beside this one sees a whole file or none."""
    beginning = file.with_suffix(".part")
    with beginning.open("wb") as stream:
        np.save(stream, frames)
    beginning.replace(file)
