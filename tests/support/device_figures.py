"""What torch itself counts on devices after each optimizer step, beside what memlog recorded."""

import json
from pathlib import Path

from memlog.events import Batch
from support.launching import Recorded

OWN_FIGURES = """
    import json
    import os

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    PEAK = "allocated_bytes.all.peak"

    def own_figures(*_):
        found = {}
        for at in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(at):
                statistics = torch.cuda.memory_stats(at)
                figures = "allocated_bytes.all.current", "reserved_bytes.all.current", PEAK
                found[f"cuda{at}"] = [statistics[name] for name in figures]
        with open(f"figures-{os.environ.get('RANK', '0')}.jsonl", "a") as file:
            print(json.dumps(found), file=file)

    register_optimizer_step_post_hook(own_figures)
"""
"""Beginning of a script that keeps torch's own figures after each optimizer step, before memlog reads any."""


def check_figures(
    run: Recorded, folder: Path, rank: int = 0, *, read_later: bool = False
) -> list[Batch]:
    """Fail if a run's steps have other figures than torch had; return the steps.

    ``read_later``: a trainer ended its steps some time after the optimizer's step, so less may be in use.
    """
    lines = (folder / f"figures-{rank}.jsonl").read_text().splitlines()
    steps = [event for event in run.events if isinstance(event, Batch)]
    highest = {one.name: one.peak or 0 for one in steps[0].devices}
    for step, line in zip(steps, lines, strict=True):
        own = json.loads(line)
        assert {one.name for one in step.devices} == own.keys()
        for one in step.devices:
            allocated, *others = own[one.name]
            assert [one.reserved, one.peak] == others
            assert one.allocated == allocated or (
                read_later and 0 < (one.allocated or 0) < allocated
            )
            assert (one.peak or 0) == highest[one.name] or one.peak_source == "exact"
            highest[one.name] = one.peak or 0
    return steps
