"""The CUDA devices that tests run on."""

import os
import tempfile
from pathlib import Path

OF_THIS_PROCESS = str(Path(tempfile.gettempdir(), f"memlog-tests-{os.getpid()}"))
"""Value of FAKE_CUDA_STATE in the test process itself: the file of its simulated devices.

Programs that a test starts share devices with each other, but not with the test process, unless the test
gives them this value.
"""

SIMULATED = "Fake CUDA device"
"""Name of each device of tests/cuda_runtime."""


def simulated() -> bool:
    """Return whether the CUDA devices run no kernels, so that no value is computed and nothing takes time."""
    import torch

    return torch.cuda.get_device_name() == SIMULATED


def need_two() -> dict[str, str]:
    """Return variables with which a program has two devices; skip the test if there is only one GPU."""
    import pytest
    import torch

    if not simulated() and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return {"FAKE_CUDA_DEVICES": "2"}
