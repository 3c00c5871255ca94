"""``memlog run`` with unchanged scripts: their behaviour, and the processes that are recorded."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import TIMEOUT, TRAIN, environment, launch, recorded, write
from support.truth import wait_until_delivered

from memlog.events import Artifact, Batch, Trace

pytestmark = pytest.mark.integration

PYTHON = sys.executable


# which processes are recorded


def test_each_python_of_a_shell_script_is_recorded_from_its_first_step_on(tmp_path: Path) -> None:
    """The runs are stored where the launcher was called, also if a script changes its folder."""
    (tmp_path / "outputs").mkdir()
    write(tmp_path, TRAIN + "\n    import os\n    os.chdir('outputs')\n    train(7)\n", "first.py")
    write(tmp_path, TRAIN + "\n    train(3)\n", "second.py")
    job = f"'{PYTHON}' first.py && cd / && cd '{tmp_path}' && '{PYTHON}' -m second\n"
    write(tmp_path, job, "job.sh")
    # Each run has one line. The first script is in another folder when it ends.
    one, two = launch(tmp_path, "bash", "job.sh").err.splitlines()
    shows = rf"`memlog show [a-z0-9]{{8}} --dir {re.escape(str(tmp_path))}/memlog_runs`"
    assert re.fullmatch(rf"memlog: Too few .* \(7\): peak .* MiB.* Run [a-z0-9]{{8}}: {shows}", one)
    shows = r"`memlog show [a-z0-9]{8}`"
    assert re.fullmatch(rf"memlog: Too few .* \(3\): peak .* MiB.* Run [a-z0-9]{{8}}: {shows}", two)
    first, second = recorded(tmp_path / "memlog_runs")
    assert (first.steps, second.steps) == (list(range(7)), list(range(3)))
    assert (first.status, second.status) == ("finished", "finished")
    batch = next(event for event in first.events if isinstance(event, Batch))
    assert batch.rss is not None
    assert batch.rss > 50 * 1024**2  # torch is loaded
    assert not first.parameters.keys() & {"rank", "world_size"}


RANKS = """
    import os
    import sys

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""


@pytest.mark.seed(165, 249)
@pytest.mark.usefixtures("ready_store")
def test_under_torchrun_rank_0_alone_has_a_trackers_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    write(tmp_path, RANKS)
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = launch(tmp_path, *torchrun, "train.py", options=("--backend", "mlflow"))
    assert "recorded" not in done.err  # no line says that a rank is not recorded
    runs = recorded(tmp_path / "memlog_runs")
    assert [run.steps for run in runs] == [list(range(6))] * 2
    by_rank = {run.parameters["rank"]: run.parameters for run in runs}
    assert sorted(by_rank) == ["0", "1"]
    assert {run.name for run in runs} == {"train.py", "train.py rank 1"}
    assert by_rank["1"]["local_rank"] == "1"
    assert {values["world_size"] for values in by_rank.values()} == {"2"}
    assert len({values["torchelastic_run_id"] for values in by_rank.values()}) == 1

    [first] = [run.directory.id for run in runs if run.parameters["rank"] == "0"]
    wait_until_delivered(tmp_path / "memlog_runs", run_id=first)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [opened] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert opened.info.run_name == "train.py"
    assert opened.data.params["memlog/rank"] == "0"


WORKERS = (
    TRAIN
    + """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            import memlog
            with memlog.track_memory("loading"):
                return torch.ones(8)

    if __name__ == "__main__":
        import sys
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for method in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(
                Data(), batch_size=4, num_workers=1, multiprocessing_context=method
            )
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
"""
)


def test_workers_of_a_data_loader_start_nothing_even_where_they_use_monitors(
    tmp_path: Path,
) -> None:
    write(tmp_path, WORKERS)
    launch(tmp_path, PYTHON, "train.py")
    [run] = recorded(tmp_path / "memlog_runs")
    assert run.steps == [0, 1, 2, 3]


CHILDREN = (
    TRAIN
    + """
    import multiprocessing
    import sys

    def work(steps, fail):
        train(steps)
        if fail:
            sys.exit(1)

    if __name__ == "__main__":
        parent_steps = int(sys.argv[1])
        train(parent_steps)
        for number, method in enumerate(sys.argv[2:]):
            work_of_its_own = 3 + number, number % 2 == 1
            child = multiprocessing.get_context(method).Process(target=work, args=work_of_its_own)
            child.start()
            child.join(120)
        train(parent_steps)
"""
)


@pytest.mark.parametrize(
    ("parent_steps", "methods"), [(5, ("fork", "spawn")), (0, ("forkserver",))]
)
def test_a_child_process_that_trains_has_a_run_of_its_own(
    tmp_path: Path, parent_steps: int, methods: tuple[str, ...]
) -> None:
    """A child has its own run, also if its parent trains. Each run has its own end."""
    write(tmp_path, CHILDREN)
    launch(tmp_path, PYTHON, "train.py", str(parent_steps), *methods)
    runs = [(len(run.steps), run.status) for run in recorded(tmp_path / "memlog_runs")]
    parents = [(10, "finished")] if parent_steps else []
    children = [(3, "finished"), (4, "failed")][: len(methods)]
    assert sorted(runs) == [*children, *parents]


POOL = (
    TRAIN
    + """
    import multiprocessing
    import sys
    import time
    from pathlib import Path

    def work(steps):
        train(steps)
        return steps

    def hang(steps):
        train(steps)
        Path("trained").touch()
        time.sleep(300)

    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
            if sys.argv[2] == "work":
                pool.map(work, [3, 3, 3, 3], chunksize=1)
            else:
                pool.map_async(hang, [3])
                while not Path("trained").exists():
                    time.sleep(0.05)
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_that_ends_its_waiting_workers_by_a_signal_ends_finished_runs(
    tmp_path: Path, method: str
) -> None:
    """``with Pool()`` sends SIGTERM to its workers; only one that is within a task is killed."""
    write(tmp_path, POOL)
    launch(tmp_path, PYTHON, "train.py", method, "work")
    runs = recorded(tmp_path / "memlog_runs")
    assert sum(len(run.steps) for run in runs) == 12
    assert {run.status for run in runs} == {"finished"}


def test_a_pools_worker_that_is_ended_within_a_task_has_no_end(tmp_path: Path) -> None:
    """So the reader of the run tells that it was killed."""
    write(tmp_path, POOL)
    launch(tmp_path, PYTHON, "train.py", "fork", "hang")
    assert [run.status for run in recorded(tmp_path / "memlog_runs")] == [None]


def test_a_process_that_only_publishes_is_recorded(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import memlog
        monitor = memlog.MemoryMonitor()
        with memlog.track_memory("loading"):
            held = bytearray(1000)
        loss = memlog.watch_loss(lambda x: x * x)
        print(loss(3.0))
        """,
        "publishes.py",
    )
    write(tmp_path, "import memlog\nprint(3.0)\n", "neither.py")
    done = launch(tmp_path, PYTHON, "neither.py")
    assert done.out == "3.0\n"
    assert done.err.count("\n") == 1
    assert done.err.startswith("memlog: nothing was recorded, because ")
    assert not (tmp_path / "memlog_runs").exists()
    assert launch(tmp_path, PYTHON, "publishes.py").out.endswith("9.0\n")
    # The line is printed also if the folder has an earlier run, even a new one.
    assert launch(tmp_path, PYTHON, "neither.py").err == done.err
    [run] = recorded(tmp_path / "memlog_runs")
    kinds = [type(event).__name__ for event in run.events]
    assert kinds.count("Scope") == 1
    assert kinds.count("Evaluation") == 1


BELOW = "import sys; print(sorted(sys.modules), [repr(f).split(' at ')[0] for f in sys.meta_path])"


def test_a_process_that_has_nothing_to_do_with_training_pays_next_to_nothing(
    tmp_path: Path,
) -> None:
    """memlog adds no imported module to such a process, and only one import finder."""
    bare = subprocess.run(
        [PYTHON, "-c", BELOW], env=environment(), capture_output=True, text=True, timeout=TIMEOUT,
        check=True,
    )  # fmt: skip
    # A child process is tested: the launched process itself checks at its end if anything was recorded.
    done = launch(tmp_path, "bash", "-c", f'"{PYTHON}" -c "{BELOW}"; true')
    assert "memlog" not in done.out.replace("<memlog_imports.ImportWatch object", "")
    assert done.out.replace("'<memlog_imports.ImportWatch object', ", "") == bare.stdout
    assert done.err == ""


# trackers, and a script's own words


def test_arguments_of_init_take_precedence_over_the_launchers_options(tmp_path: Path) -> None:
    write(
        tmp_path,
        TRAIN.replace("import torch", "import memlog, torch")
        + """
    session = memlog.init("local", name="scripts")
    print(session.settings.backends, session.settings.name, session.settings.project,
          session.settings.alerts)
    train(4)
    memlog.finish()
    train(4)   # after the script's own end nothing begins by itself
    """,
    )
    options = (
        "--backend",
        "mlflow",
        "--name",
        "launchers",
        "--project",
        "p",
        "--alert",
        "host.rss > 80%",
    )
    done = launch(tmp_path, PYTHON, "train.py", options=options)
    assert done.out == "('local',) scripts p ('host.rss > 80%',)\n"
    [run] = recorded(tmp_path / "memlog_runs")
    assert run.steps == [0, 1, 2, 3]
    assert not (tmp_path / "mlflow.db").exists()


def test_a_script_that_switches_memlog_off_is_not_recorded(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    import memlog\n    memlog.init(enabled=False)\n    train(3)\n")
    assert launch(tmp_path, PYTHON, "train.py").err == ""
    assert not (tmp_path / "memlog_runs").exists()


@pytest.mark.cuda
def test_the_first_step_has_its_device(tmp_path: Path) -> None:
    on_device = TRAIN.replace("(8, 8)", "(8, 8).cuda()").replace("(4, 8)", "(4, 8).cuda()")
    write(tmp_path, on_device + "\n    train(3)\n")
    launch(tmp_path, PYTHON, "train.py")
    [run] = recorded(tmp_path / "memlog_runs")
    batches = [event for event in run.events if isinstance(event, Batch)]
    assert [(batch.step, batch.devices[0].name) for batch in batches] == [
        (0, "cuda0"),
        (1, "cuda0"),
        (2, "cuda0"),
    ]
    assert all(batch.devices[0].allocated for batch in batches)


def test_an_untouched_script_is_traced_and_judged_by_the_launchers_rule(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    train(12)\n")
    options = ("--layers", "--budget", "0.5", "--alert", "host.rss > 1 MiB")
    done = launch(tmp_path, PYTHON, "train.py", options=options)
    assert done.err.count("host.rss") == 1
    (run,) = recorded(tmp_path / "memlog_runs")
    events = [type(event).__name__ for event in run.directory.events()]
    assert events.count("Alert") == 1
    traces = [event for event in run.events if isinstance(event, Trace)]
    assert [trace.step for trace in traces] == [1, 3]  # the session begins at the first step
    assert traces[0].at_peak["parameters"] == 4 * (8 * 8 + 8)
    assert "Linear" in {layer.path for layer in traces[0].layers}
    kinds = {event.kind for event in run.directory.events() if isinstance(event, Artifact)}
    assert kinds == {"flamegraph", "report"}
