"""Expected results for each script, read from expected.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.insight.series import HERE, SCRIPTS

KINDS = frozenset(
    {
        "kept_graph",
        "kept_tensors",
        "growing_container",
        "gradients_not_cleared",
        "unowned_gradients",
        "forward_without_backward",
        "optimizers_pile_up",
        "model_copies",
        "hooks_pile_up",
        "reference_cycles",
        "python_memory",
        "native_library",
        "worker_process",
        "shared_memory",
        "allocator_free_lists",
        "device_fragmentation",
        "graph_pools",
        "allocator_retries",
        "larger_steps",
        "growth",
    }
)
"""The kinds of findings that memlog documents."""

MARKER = "# leak"
"""Comment at the end of a script's line that is at fault."""


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The truth about one script.

    Attributes:
        faulty: True if the script has a fault.
        source: Address of the issue or forum thread with the pattern.
        kinds: Kinds of findings that name the cause, the best kind first; empty if the script is healthy.
        where: Texts that name the place. A finding has to contain one of them, or the marked line.
        rate_mib: Lowest and highest growth in MiB per step, as measured without memlog; both 0 if the
            script does not grow.
        not_on_device: Reason why the script can't run with its tensors on a device; empty if it can.
    """

    faulty: bool
    source: str
    kinds: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    rate_mib: tuple[float, float] = (0.0, 0.0)
    not_on_device: str = ""

    @property
    def grows(self) -> bool:
        """True if memory grows from step to step."""
        return self.faulty and self.rate_mib[1] > 0


def load(path: Path = HERE / "expected.toml") -> dict[str, Expected]:
    """Return the expected results by the name of their script."""
    # Not tomllib: Python 3.10 does not have it.
    table: dict[str, Any] = msgspec.toml.decode(path.read_text())
    return {name: msgspec.convert(record, Expected) for name, record in table.items()}


def marked_lines(name: str) -> list[int]:
    """Return the numbers of a script's lines that end with the marker, from 1."""
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(MARKER)]
