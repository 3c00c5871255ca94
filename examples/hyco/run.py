"""One experiment of ``conf/``, with memlog if its configuration enables it.

    python run.py --config-name=burgers_experiment trainer=synthetic_with_memory
    python run.py --config-name=heat_physical_experiment trainer=physical_with_memory

The trainers use memlog's monitors only. ``memlog.init`` below takes the tracker and the alerts from the
configuration's section ``memlog``, and the two keys of the monitors from ``trainer_params``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

import memlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that holds `hyco`

from hyco.config import Config, read_config


class Trainer(Protocol):
    """Interface of both trainers."""

    def train(self) -> None:
        """Train."""


def trainer_for(config: Config) -> Trainer:
    """Return the experiment's trainer. Only its module is imported, because PhiFlow takes two seconds."""
    if config.synthetic and config.network:
        from hyco.synthetic import SyntheticTrainer  # noqa: PLC0415 - see above

        return SyntheticTrainer(config, config.synthetic, config.network)
    if config.physical:
        from hyco.physical import PhysicalTrainer  # noqa: PLC0415 - see above

        return PhysicalTrainer(config, config.physical)
    raise ValueError("a synthetic model needs a network: model/synthetic=unet_small")


@hydra.main(version_base="1.3", config_path="conf", config_name="burgers_experiment")
def main(composed: DictConfig) -> None:
    torch.set_num_threads(composed.threads)
    plain: Any = OmegaConf.to_container(composed, resolve=True)
    try:
        config = read_config(plain)
    except ValueError as error:
        sys.exit(f"This configuration can't be trained: {error}")
    with memlog.init(config=plain):
        trainer_for(config).train()


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    main()
