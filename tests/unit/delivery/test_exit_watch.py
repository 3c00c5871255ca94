"""How a process ended, seen by another process that is not its parent."""

import os
import platform
import subprocess
import sys

import pytest

from memlog.delivery.helper.training_process import ExitWatch, _kept_status, _meaning

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how a process ended")

KEEPS_STATUS = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 15)
ENDS = {
    "os._exit(7)": (7, None),
    "os.kill(os.getpid(), 9)": (None, "SIGKILL"),
}


def started(end: str) -> "subprocess.Popen[bytes]":
    script = f"import os, sys; sys.stdin.read(); {end}"
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)


@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_or_the_signal(end: str) -> None:
    with started(end) as process:
        watch = ExitWatch(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        assert watch._thread is not None
        watch._thread.join(60)  # the parent waits for the process only after that
        seen = watch.result()
    assert (seen.code, seen.signal) == ENDS[end]


@pytest.mark.skipif(not KEEPS_STATUS, reason="Linux before 6.15 keeps no status")
@pytest.mark.parametrize("end", ENDS)
def test_a_parent_that_waits_at_once_does_not_hide_it(end: str) -> None:
    with started(end) as process:
        descriptor = os.pidfd_open(process.pid)
    status = _kept_status(descriptor)
    os.close(descriptor)
    assert status is not None
    assert _meaning(status) == ENDS[end]
