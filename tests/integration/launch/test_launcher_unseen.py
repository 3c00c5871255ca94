"""``memlog run`` changes nothing that the user's script sees: input, output, signals, customizations."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import TIMEOUT, TRAIN, environment, launch, recorded, start, write

pytestmark = pytest.mark.integration

PYTHON = sys.executable


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
    own, line = err[: len(bare.stderr)], err[len(bare.stderr) :].decode()
    assert own == bare.stderr
    assert re.fullmatch(r"memlog: Too few steps .*: peak .* Run \w+: `memlog show \w+`\n", line)
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
    # While a session records, it waits for the import of a trainer's library, as docs/launcher.md says, and
    # of the modules that save checkpoints.
    waiting = "<memlog._internal.import_hook.ImportWatch object"
    assert found["finders"][0] == waiting
    found["finders"] = [finder for finder in found["finders"] if finder != waiting]
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
    # `memlog run` itself is a Python process. It must start without the folder that has the error.
    inner = f"export PYTHONPATH=$PYTHONPATH:{tmp_path}; exec '{PYTHON}' -c 'print(1)'"
    bare = subprocess.run(
        [PYTHON, "-c", "print(1)"], env=environment(PYTHONPATH=paths), capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    done = launch(tmp_path, "bash", "-c", inner, code=None)
    ours = [line for line in done.err.splitlines() if not line.startswith("memlog: nothing was")]
    assert (done.code, done.out, ours) == (bare.returncode, bare.stdout, bare.stderr.splitlines())


def test_without_memlog_in_that_python_the_script_goes_on(tmp_path: Path) -> None:
    write(
        tmp_path, "import sys\nsys.modules['memlog'] = None\n" + "import torch\nprint('trained')\n"
    )
    done = launch(tmp_path, PYTHON, "train.py")
    assert done.out == "trained\n"
    [line] = done.err.splitlines()
    assert line.startswith("memlog: this process goes on without being recorded (")


def test_an_unwritable_folder_is_reported_and_training_goes_on(tmp_path: Path) -> None:
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
        "memlog: this process goes on without being recorded (can't make a folder"
    )
