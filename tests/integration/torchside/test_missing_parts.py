"""A version of torch that lacks a private part: training goes on, and memlog says what it can't do."""

from pathlib import Path

import pytest
from support import child

TRAINING = """
import torch
# torch's own code has taken what it needs.
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
{removal}
import memlog
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.Adam(model.parameters())
memlog.init("local", layers=True)
for _ in range(30):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
memlog.finish()
print("trained")
"""
ESTIMATE = """
import torch
{removal}
import memlog
model = torch.nn.Linear(8, 8)
try:
    memlog.estimate(lambda: model(torch.ones(2, 8)).sum().backward(), model=model)
except memlog.ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("removal", "said"),
    [
        ("del torch._C.TensorBase", "waiting for a step to trace failed"),
        ("del torch.autograd._get_sequence_nr", ""),
        (
            "import torch.utils._python_dispatch as modes; del modes._push_mode",
            "a step could not be traced",
        ),
        ("del torch._C._profiler._ExperimentalConfig", ""),
    ],
)
def test_training_goes_on(removal: str, said: str, tmp_path: Path) -> None:
    program = child.start(TRAINING.format(removal=removal), tmp_path)
    output, errors = program.communicate(timeout=240)
    assert output == "trained\n", errors
    assert said in errors
    assert "`memlog show " in errors


def test_an_estimate_says_which_part_is_missing(tmp_path: Path) -> None:
    output = child.run(ESTIMATE.format(removal="del torch._C._DisableTorchDispatch"), tmp_path)
    assert "has changed what estimates need" in output
    assert "_DisableTorchDispatch" in output
