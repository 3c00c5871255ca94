"""``memlog run`` with unchanged scripts: their behaviour, and the processes that are recorded."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import TIMEOUT, TRAIN, environment, launch, recorded, start, write
from support.mlflow_server import free_port
from support.truth import wait_until_delivered

from memlog.events import Artifact, Batch, Trace

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]

PYTHON = sys.executable


# which processes are recorded


def test_every_step_of_an_untouched_script_is_recorded_from_the_first_on(tmp_path: Path) -> None:
    """The run stands where the launcher was called, wherever the script goes."""
    (tmp_path / "outputs").mkdir()
    write(tmp_path, TRAIN + "\n    import os\n    os.chdir('outputs')\n    train(7)\n")
    assert launch(tmp_path, PYTHON, "train.py").err == ""
    [run] = recorded(tmp_path / "memlog_runs")
    assert run.steps == list(range(7))
    first = next(event for event in run.events if isinstance(event, Batch))
    assert first.rss is not None
    assert first.rss > 50 * 1024**2  # torch is loaded
    assert run.status == "finished"
    assert not run.parameters.keys() & {"rank", "world_size"}


def test_a_script_whose_optimizers_are_nested_or_take_turns_counts_as_with_init(
    tmp_path: Path,
) -> None:
    script = """
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, inner):
                super().__init__(inner.param_groups, {})
                self.inner = inner

            def step(self, closure=None):
                self.inner.step(closure)

        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.ones(2)
        first = Wrapper(torch.optim.SGD([weight], lr=0.1))
        second = torch.optim.SGD([weight], lr=0.1)
        for _ in range(6):
            first.step()
            second.step()
    """
    write(tmp_path, "import torch\n" + script.replace("\n        ", "\n"))
    launch(tmp_path, PYTHON, "train.py")
    [run] = recorded(tmp_path / "memlog_runs")
    assert run.steps == list(range(6))


def test_a_shell_script_and_a_module_are_recorded_each_once(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    train(5)\n", "first.py")
    write(tmp_path, TRAIN + "\n    train(3)\n", "second.py")
    write(
        tmp_path,
        f"'{PYTHON}' first.py && cd / && cd '{tmp_path}' && '{PYTHON}' -m second\n",
        "job.sh",
    )
    launch(tmp_path, "bash", "job.sh", options=("--dir", "runs"))
    assert [len(run.steps) for run in recorded(tmp_path / "runs")] == [5, 3]


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
def test_under_torchrun_each_rank_has_a_run_and_the_first_alone_one_in_the_tracker(
    tmp_path: Path,
) -> None:
    from mlflow import MlflowClient

    write(tmp_path, RANKS)
    torchrun = (
        PYTHON,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    )
    done = launch(
        tmp_path,
        *torchrun,
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "train.py",
        options=("--backend", "mlflow"),
    )
    assert "recorded" not in done.err  # by nobody, or not by one of them
    runs = recorded(tmp_path / "memlog_runs")
    assert [run.steps for run in runs] == [list(range(6))] * 2
    told = {run.parameters["rank"]: run.parameters for run in runs}
    assert sorted(told) == ["0", "1"]
    assert {run.name for run in runs} == {"train.py", "train.py rank 1"}
    assert told["1"]["local_rank"] == "1"
    assert {values["world_size"] for values in told.values()} == {"2"}
    assert len({values["torchelastic_run_id"] for values in told.values()}) == 1

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
                Data(), batch_size=4, num_workers=2, multiprocessing_context=method
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
        method, parent_steps = sys.argv[1], int(sys.argv[2])
        train(parent_steps)
        for steps, fail in ((3, False), (4, True)):
            child = multiprocessing.get_context(method).Process(target=work, args=(steps, fail))
            child.start()
            child.join(120)
        train(parent_steps)
"""
)


@pytest.mark.parametrize(
    ("method", "parent_steps"), [("fork", 0), ("fork", 5), ("spawn", 5), ("forkserver", 0)]
)
def test_a_child_process_that_trains_has_a_run_of_its_own(
    tmp_path: Path, method: str, parent_steps: int
) -> None:
    """This also holds if its parent trains; each run has its own end."""
    write(tmp_path, CHILDREN)
    launch(tmp_path, PYTHON, "train.py", method, str(parent_steps))
    runs = [(len(run.steps), run.status) for run in recorded(tmp_path / "memlog_runs")]
    parents = [(10, "finished")] if parent_steps else []
    assert sorted(runs) == [(3, "finished"), (4, "failed"), *parents]


def test_a_process_that_only_publishes_is_recorded_and_one_that_does_neither_is_not(
    tmp_path: Path,
) -> None:
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
    write(tmp_path, "import memlog, torch\nprint(torch.ones(3).sum().item())\n", "neither.py")
    done = launch(tmp_path, PYTHON, "neither.py")
    assert done.out == "3.0\n"
    assert done.err.count("\n") == 1
    assert done.err.startswith("memlog: nothing was recorded: ")
    assert not (tmp_path / "memlog_runs").exists()
    assert launch(tmp_path, PYTHON, "publishes.py").out.endswith("9.0\n")
    # It is said also where an earlier run stands, however new.
    assert launch(tmp_path, PYTHON, "neither.py").err == done.err
    [run] = recorded(tmp_path / "memlog_runs")
    kinds = [type(event).__name__ for event in run.events]
    assert kinds.count("Scope") == 1
    assert kinds.count("Evaluation") == 1


BELOW = "import sys; print(sorted(sys.modules), [repr(f).split(' at ')[0] for f in sys.meta_path])"


def test_a_process_that_has_nothing_to_do_with_training_pays_next_to_nothing(
    tmp_path: Path,
) -> None:
    """It imports no module more than without memlog, and has one more finder."""
    bare = subprocess.run(
        [PYTHON, "-c", BELOW], env=environment(), capture_output=True, text=True, timeout=TIMEOUT,
        check=True,
    )  # fmt: skip
    # Not the process that was launched itself, which looks at its end whether anything was recorded.
    done = launch(tmp_path, "bash", "-c", f'"{PYTHON}" -c "{BELOW}"; true')
    assert "memlog" not in done.out.replace("<memlog_imports.ImportWatch object", "")
    assert done.out.replace("'<memlog_imports.ImportWatch object', ", "") == bare.stdout
    assert done.err == ""


# what passes through


ENDS = {
    "code": ("sys.exit(3)", 3, "finished"),
    "exception": ("raise ValueError('no')", 1, "failed"),
    "terminated": ("os.kill(os.getpid(), 15)", -15, None),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_exit_code_is_the_scripts_own(tmp_path: Path, how: str) -> None:
    ending, code, status = ENDS[how]
    write(tmp_path, TRAIN + f"\n    import os, sys\n    train(2)\n    {ending}\n")
    launch(tmp_path, PYTHON, "train.py", code=code)
    [run] = recorded(tmp_path / "memlog_runs")
    assert (run.steps, run.status) == ([0, 1], status)


def test_ctrl_c_reaches_the_script_and_ends_the_run_as_killed(tmp_path: Path) -> None:
    write(
        tmp_path,
        TRAIN
        + "\n    import time\n    train(2)\n    print('ready', flush=True)\n    time.sleep(600)\n",
    )
    with start(tmp_path, PYTHON, "train.py") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors
    assert [run.status for run in recorded(tmp_path / "memlog_runs")] == ["killed"]


SEEN = """
    import json
    import os
    import sys

    import torch

    sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1] + bytes(range(256)))
    sys.stderr.buffer.write(b"\\xff no text\\n")
    train(2)
    seen = {
        "argv": sys.argv,
        "path": sys.path,
        "modules": [name for name in ("sitecustomize", "usercustomize") if name in sys.modules],
        "finders": [repr(finder).split(" at ")[0] for finder in sys.meta_path],
        "environment": dict(os.environ),
    }
    print("\\n" + json.dumps(seen, sort_keys=True))
"""


def test_the_script_sees_and_writes_what_it_does_without_memlog(tmp_path: Path) -> None:
    import json

    write(tmp_path, TRAIN + SEEN)
    command = (PYTHON, "train.py", "--backend", "x", "--", "-h")
    given = b"from a pipe\x00"
    with_memlog = start(tmp_path, *command)
    out, err = with_memlog.communicate(given, timeout=TIMEOUT)
    bare = subprocess.run(
        command, cwd=tmp_path, env=environment(), input=given, capture_output=True,
        timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert recorded(tmp_path / "memlog_runs")[0].steps == [0, 1]
    assert err == bare.stderr
    text, seen = out.rsplit(b"\n", 2)[:2]
    bare_text, bare_seen = bare.stdout.rsplit(b"\n", 2)[:2]
    assert text == bare_text
    found, expected = json.loads(seen), json.loads(bare_seen)
    changed = {
        name for name in found["environment"].keys() | expected["environment"].keys()
        if found["environment"].get(name) != expected["environment"].get(name)
    }  # fmt: skip
    assert changed == {"PYTHONPATH", "MEMLOG_LAUNCH"}
    behind = expected["environment"].get("PYTHONPATH", "")
    assert found["environment"]["PYTHONPATH"].endswith(f"/site:{behind}".rstrip(":"))
    del found["environment"], expected["environment"]
    assert found == expected


def test_a_pipe_that_closes_ends_a_program_as_without_memlog(tmp_path: Path) -> None:
    with start(tmp_path, "bash", "-c", "yes") as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(TIMEOUT) == -signal.SIGPIPE
        finally:
            process.kill()


# the user's own


CUSTOMIZED = "import sys\nsys.users_{0} = __file__\nimport math\n"


def test_the_sitecustomize_and_usercustomize_of_the_users_are_imported_as_without(
    tmp_path: Path,
) -> None:
    for name in ("sitecustomize", "usercustomize"):
        write(tmp_path, CUSTOMIZED.format(name), f"{name}.py")
    write(
        tmp_path,
        "import sys, sitecustomize, usercustomize\n"
        "print(sys.users_sitecustomize, sys.users_usercustomize)\n"
        "print(sitecustomize.__file__, sys.modules['sitecustomize'].math.pi)\n",
        "seen.py",
    )
    # In a virtual environment Python leaves usercustomize out.
    python = getattr(sys, "_base_executable", PYTHON)
    paths = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    bare = subprocess.run(
        [python, "seen.py"], cwd=tmp_path, env=environment(PYTHONPATH=paths),
        capture_output=True, text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    done = launch(tmp_path, python, "seen.py", PYTHONPATH=paths)
    assert done.out == bare.stdout
    assert str(tmp_path / "sitecustomize.py") in done.out


@pytest.mark.parametrize("wrong", ["import no_such_module", "1 / 0"])
def test_an_error_in_the_users_sitecustomize_is_shown_as_without_memlog(
    tmp_path: Path, wrong: str
) -> None:
    write(tmp_path, wrong, "sitecustomize.py")
    paths = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    # `memlog run` itself is a Python, too: so it is called where that error is not.
    inner = f"export PYTHONPATH=$PYTHONPATH:{tmp_path}; exec '{PYTHON}' -c 'print(1)'"
    bare = subprocess.run(
        [PYTHON, "-c", "print(1)"], env=environment(PYTHONPATH=paths), capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    done = launch(tmp_path, "bash", "-c", inner, code=None)
    ours = [line for line in done.err.splitlines() if not line.startswith("memlog: nothing was")]
    assert (done.code, done.out, ours) == (bare.returncode, bare.stdout, bare.stderr.splitlines())


def test_without_memlog_in_that_python_the_script_goes_on_and_one_line_says_so(
    tmp_path: Path,
) -> None:
    write(
        tmp_path, "import sys\nsys.modules['memlog'] = None\n" + "import torch\nprint('trained')\n"
    )
    done = launch(tmp_path, PYTHON, "train.py")
    assert done.out == "trained\n"
    assert [line.split(" (")[0] for line in done.err.splitlines()] == [
        "memlog: this process is not recorded, it goes on",
        "memlog: nothing was recorded: memlog noticed no optimizer step",
    ]


def test_a_folder_that_can_not_be_written_at_the_first_step_is_said_and_training_goes_on(
    tmp_path: Path,
) -> None:
    script = f"""
    import pathlib
    pathlib.Path({str(tmp_path / "runs")!r}).write_text("in the way")
    train(3)
    print("trained")
    """
    write(tmp_path, TRAIN + script)
    done = launch(tmp_path, PYTHON, "train.py", options=("--dir", "runs"))
    assert done.out == "trained\n"
    assert done.err.count("\n") == 1
    assert done.err.startswith(
        "memlog: this process is not recorded, it goes on (can't make a folder"
    )


# trackers, and a script's own words


@pytest.mark.usefixtures("ready_store")
@pytest.mark.parametrize(("when", "options"), [("before", ()), ("after", ("--backend", "mlflow"))])
def test_a_run_that_the_script_opens_is_joined(
    tmp_path: Path, when: str, options: tuple[str, ...]
) -> None:
    from mlflow import MlflowClient

    opening = "mlflow.start_run(run_name='users')"
    parts = [opening, "train(5)"] if when == "before" else ["train(5)", opening]
    # The client is loaded before the first step: on a slow machine it takes longer than the seconds for
    # which a named backend waits for the user's run.
    begin = ["", "import mlflow", "mlflow.search_experiments()"]
    script = "\n    ".join([*begin, *parts, "train(3)", "mlflow.log_metric('loss', 1.5)"])
    write(tmp_path, TRAIN + script + "\n")
    launch(tmp_path, PYTHON, "train.py", options=options)
    wait_until_delivered(tmp_path / "memlog_runs")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.run_name == "users"
    steps = [row.step for row in client.get_metric_history(run.info.run_id, "memory/host/rss_mib")]
    assert sorted(steps) == list(range(8))


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


def test_an_alert_rule_of_the_launcher_fires(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    train(3)\n")
    done = launch(tmp_path, PYTHON, "train.py", options=("--alert", "host.rss > 1 MiB"))
    assert done.err.count("host.rss") == 1
    [run] = recorded(tmp_path / "memlog_runs")
    assert [type(event).__name__ for event in run.events].count("Alert") == 1


@pytest.mark.gpu
def test_the_first_step_has_its_device(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
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


def test_a_step_of_an_untouched_script_is_traced(tmp_path: Path) -> None:
    write(tmp_path, TRAIN + "\n    train(12)\n")
    launch(tmp_path, sys.executable, "train.py", options=("--layers", "--budget", "0.5"))
    (run,) = recorded(tmp_path / "memlog_runs")
    traces = [event for event in run.events if isinstance(event, Trace)]
    assert [trace.step for trace in traces] == [1, 3]  # the session begins at the first step
    assert traces[0].at_peak["parameters"] == 4 * (8 * 8 + 8)
    assert "Linear" in {layer.path for layer in traces[0].layers}
    kinds = [
        e.event.kind
        for f in run.directory.files()
        for e in f.read()
        if isinstance(e.event, Artifact)
    ]
    assert kinds == ["flamegraph"]
