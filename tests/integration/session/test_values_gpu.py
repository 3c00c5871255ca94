"""What only kernels that compute can show: on a GPU, training computes the same values with memlog."""

from pathlib import Path

import pytest
from support import child

pytestmark = pytest.mark.gpu

PROGRAM = """
    import hashlib
    import sys

    import torch
    import memlog

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
    ).to(sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(sys.argv[1])
    if sys.argv[2] == "with":
        memlog.init("local", model=model, layers=True, budget=1.0)
    for step in range(40):
        inputs = torch.randn(128, 64, device=sys.argv[1])
        kept = inputs[inputs.sum(1) > 0]  # its number of rows depends on values
        with torch.autocast(sys.argv[1], torch.float16):
            loss = model(kept).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(digest.hexdigest(), scaler.get_scale())
"""


def test_training_computes_the_same_with_and_without_memlog(tmp_path: Path) -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    bare, watched = (
        child.run(PROGRAM, tmp_path, "cuda", how, **environment) for how in ("without", "with")
    )
    assert bare == watched
