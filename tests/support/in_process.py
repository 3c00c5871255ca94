"""Training scripts with an offline W&B run of the user's, and what memlog recorded of the scripts."""

from pathlib import Path

from memlog.journal import RunDirectory, find_run
from support import child
from support.truth import plan_of
from support.wandb_file import WandbFile

PREAMBLE = """
    import sys
    import time

    import wandb

    def start(**arguments):
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        return wandb.init(project="p", mode="offline", settings=quiet, **arguments)

    if "--memlog" in sys.argv:
        import memlog
        from memlog.delivery.helper import protocol
        protocol.SETTLED_WITHIN = 60.0  # on a busy machine, a second may be too short
        session = memlog.init("wandb", finish_timeout=60)
        step = session.step
    else:
        step = lambda: None

    def steps(count, first=0):
        for number in range(first, first + count):
            step()
            time.sleep(0.002)
            yield number
"""
USERS = {
    "with step=": """
    run = start()
    for s in steps(150):
        run.log({"loss": 1 / (s + 1)}, step=s)
    """,
    "with sparse step=, twice a step": """
    run = start()
    for s in steps(200):
        if s % 10 == 0:
            run.log({"loss": 1 / (s + 1)}, step=s)
            run.log({"accuracy": s}, step=s)
    """,
    "without a step": """
    run = start()
    for s in steps(150):
        wandb.log({"loss": 1 / (s + 1)})
    """,
    "with commit=False": """
    run = start()
    for s in steps(150):
        run.log({"loss": 1 / (s + 1)}, commit=False)
        if s % 3 == 2:
            run.log({"accuracy": s})
    """,
    "with a glob of their own": """
    run = start()
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    for s in steps(150):
        if s % 5 == 0:
            wandb.log({"train/loss": 1 / (s + 1), "trainer/global_step": s})
    """,
    "resumed at a step": """
    run = start()
    for s in steps(100, first=1000):
        run.log({"loss": 1 / s}, step=s)
    """,
}
"""Ways in which users log, each with a name."""


def recorded(directory: Path) -> RunDirectory:
    return find_run(directory / "memlog_runs", "latest")


def assert_every_step_is_there(made: WandbFile, run: RunDirectory) -> None:
    wanted = [(p.name, p.index, p.value) for p in plan_of(run, "full")]
    got = [
        (name, row[f"memlog/{axis}"], value)
        for row in made.memlogs_rows()
        for axis in ("step", "evaluation", "epoch")
        if f"memlog/{axis}" in row
        for name, value in row.items()
        if name != f"memlog/{axis}"
    ]
    assert sorted(got) == sorted(wanted)


def sync_offline(directory: Path, **environment: str) -> str:
    return child.memlog(
        "sync", "latest", directory=directory, **{"WANDB_MODE": "offline", **environment}
    )
