"""`memlog doctor` on a machine with NVIDIA devices."""

import json
import subprocess
import sys
from typing import Any

import pytest
from support import devices

torch: Any = pytest.importorskip("torch")

pytestmark = [pytest.mark.integration, pytest.mark.cuda]


def test_it_names_the_devices_and_what_torch_is_built_for() -> None:
    command = [sys.executable, "-m", "memlog", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    [found] = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "CUDA"]
    name = torch.cuda.get_device_name()
    assert found["state"] == "ok"
    assert name in found["text"]
    assert found["text"].endswith(f"; torch is for CUDA {torch.version.cuda}")
    if devices.simulated():
        assert found["text"].startswith("Fake CUDA device 16.0 GiB, driver ")
