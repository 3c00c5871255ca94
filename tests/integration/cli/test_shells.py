"""Completion in the shells themselves, as far as they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.journals import GIB, MadeRun, at, batch

from memlog.events import Run

pytestmark = pytest.mark.integration

ASK = {
    "bash": """
        eval "$(memlog completion bash)"
        complete -p memlog
        COMP_WORDS=(memlog show qui) COMP_CWORD=2
        _memlog_completion memlog
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    # zsh's completion calls these functions; `_describe` gets the candidates, and prints them here.
    "zsh": """
        compdef() { print "compdef $*" }
        compadd() { :; }
        _describe() { print -l -- "${(@P)3}" }
        eval "$(memlog completion zsh)"
        words=(memlog show qui) CURRENT=3
        _memlog_completion
    """,
    "fish": """
        memlog completion fish | source
        complete -C 'memlog show qui'
    """,
}
ANSWERS = {
    "bash": ["complete -o nosort -F _memlog_completion memlog", "quiet-bear"],
    "zsh": ["compdef _memlog_completion memlog", "quiet-bear:run k7m2xq9a"],
    "fish": ["quiet-bear\trun k7m2xq9a"],
}


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes_the_name_of_a_run(tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    made = MadeRun(tmp_path / "runs").write(Run(at(0), None, None, (), {}))
    made.bound("mlflow", "3f2a9c", None, "quiet-bear").write(batch(0, GIB)).closed()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [program, "-c", ASK[shell]],
        env={
            **os.environ,
            "PATH": path,
            "MEMLOG_DIR": str(tmp_path / "runs"),
            "HOME": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ANSWERS[shell], done.stderr
