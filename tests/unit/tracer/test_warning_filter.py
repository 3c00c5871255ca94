"""The filter for torch's warning about global hooks, beside the program's own warnings."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import warnings

    import torch

    from memlog.tracer.function_patch import COMPILE_WARNING_FILTER

    def notice():
        warnings.warn("my notice", FutureWarning)

    for number in range(3):
        notice()
        COMPILE_WARNING_FILTER.add(number)
        notice()
        warnings.warn("Using `torch.compile(module)` when there are global hooks on modules")
        COMPILE_WARNING_FILTER.remove(number)
    warnings.warn("Using `torch.compile(module)` when there are global hooks on modules")
"""


def test_a_warning_is_printed_as_often_as_without_memlog() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("FutureWarning: my notice") == 1
    assert done.stderr.count("when there are global hooks") == 1
