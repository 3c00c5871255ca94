"""Run a script with its tensors on a device: ``python -m benchmarks.insight.on_device DEVICE SCRIPT``.

The scripts name no device, so torch's default device is set before a script begins.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

_variables: dict[str, Any] = {}


def run_script(device: str, script: str) -> None:
    """Run a script as ``__main__``. On ``cpu``, torch's default stays as it is.

    As in any program, the script's variables live until the process ends.
    """
    if device != "cpu":
        import torch

        torch.set_default_device(device)
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    _variables.update(runpy.run_path(script, run_name="__main__"))


if __name__ == "__main__":
    run_script(*sys.argv[1:])
