"""Events about the run itself: its start, end and files, what a checkpoint saves, memlog's own cost."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from memlog.events.parts import Int, Status


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Start of a run."""

    time_us: Int
    name: str | None
    project: str | None
    backends: tuple[str, ...]
    settings: dict[str, str]
    """Settings passed to ``init``, as text and without secrets."""


class Parameters(msgspec.Struct, frozen=True, array_like=True, tag="parameters"):
    """Facts that hold for the whole run (versions, devices, sizes), stored as the tracker's parameters."""

    time_us: Int
    values: dict[str, str]


class Origin(msgspec.Struct, frozen=True, array_like=True, tag="origin"):
    """Origin of a run. A field is ``None`` if its value is unknown.

    Trackers get the fields as parameters of the run.
    """

    time_us: Int
    command: str | None
    """Command line of the training process as in a shell, without secrets."""
    python: str
    """Version of Python, such as ``3.11.7``."""
    host: str
    git_commit: str | None
    """Commit of the git repository that contains the working directory."""
    git_uncommitted_changes: bool | None
    """True if files of ``git_commit`` were changed or removed. Files unknown to git do not count."""
    working_directory: str | None
    """Working directory relative to the repository's folder; ``.`` for that folder itself."""


class Device(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """Accelerator that the run uses. The event is published once, before the device's first reading."""

    time_us: Int
    name: str
    product: str | None
    """Product name, such as ``NVIDIA H100 80GB HBM3``."""
    capacity: Int | None
    """Total bytes of the device, or of the MIG instance."""
    uuid: str | None = None
    """Identity of the device, or of the MIG instance, without a prefix; ``None`` if torch reports none."""
    allocator: str | None = None
    """Settings of the device's caching allocator, as in the variable ``PYTORCH_ALLOC_CONF``; empty: the
    defaults. ``None`` for devices other than CUDA's."""
    shares_host: bool = False
    """True if the device has no memory of its own, but uses the host's, as a GB10 does."""


REPORT_FILE = "report.html"
REPORT_KIND = "report"
"""Kind of the artifact that is memlog's report of the run. Only this artifact has both this kind and the name
`REPORT_FILE`."""


POSTMORTEM_FILE = "postmortem.md"
POSTMORTEM_KIND = "postmortem"
"""Name and kind of the artifact that explains a run's bad end."""


class Artifact(msgspec.Struct, frozen=True, array_like=True, tag="artifact"):
    """File that was saved in the run's folder, to be uploaded to every backend."""

    time_us: Int
    name: str
    kind: str
    path: str
    """Path relative to the run's folder."""
    size: Int

    @property
    def is_report(self) -> bool:
        """True if the file is memlog's report of the run: one HTML file that loads no other file."""
        return (self.name, self.kind) == (REPORT_FILE, REPORT_KIND)


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """memlog's own cost and errors since the run began."""

    time_us: Int
    step: Int | None
    overhead_ms: float | None
    """Mean milliseconds per step that memlog took on the trainer's thread since the last health event."""
    overhead_total_ms: float
    dropped: dict[str, Int]
    faults: dict[str, Int]
    queued: bool = False
    """True if the file system is so slow that the journal is written through a queue."""
    unjudged: dict[str, str] = {}
    """Alert rules that memlog never judged, each with the reason; empty before the end of the run."""
    tracing_ms: float = 0.0
    """Total milliseconds by which traced steps took longer than untraced steps. ``tracing_set_up_ms`` is not
    included."""
    tracing_set_up_ms: float = 0.0
    """Extra milliseconds of the first two traced steps, which set up tracing."""
    steps: Int | None = None
    """Number of steps that ``overhead_total_ms`` covers. Only the trainer's last health event has this
    number; in other health events it is ``None``."""
    untraced: str = ""
    """Reason why the first traced step waits, with the remedy; empty if it does not wait."""


class Exit(msgspec.Struct, frozen=True, array_like=True, tag="exit"):
    """End of a training process that wrote no `End` event. The helper process writes this event instead."""

    time_us: Int
    code: Int | None
    """Exit code; ``None`` if a signal ended the process, or if the code is unknown."""
    signal: str | None
    """Name of the signal that ended the process, such as ``SIGKILL``."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End of a run."""

    time_us: Int
    status: Status
    reason: str | None = None
    """Reason of a bad end: the type of the exception that ended the program, or `LOST_CONNECTION`."""


LOST_CONNECTION = "lost the connection to another rank"
"""Reason of the end of a rank whose collective failed because another rank was gone."""


class RankDoubt(msgspec.Struct, frozen=True, array_like=True, tag="rank_doubt"):
    """Another rank's memory rose until the end, and no cause was found. In the run of the lowest rank."""

    time_us: Int
    step: Int | None
    """Last completed step of the other rank."""
    rank: Int
    text: str
    """Verdict on the other rank's memory."""


class RankFailure(msgspec.Struct, frozen=True, array_like=True, tag="rank_failure"):
    """Bad end of a training with several ranks, in the run of the lowest rank. The newest event counts."""

    time_us: Int
    """Time at which the rank that failed first failed, by the clock of its machine."""
    step: Int | None
    """Last completed step of the rank that failed first."""
    rank: Int | None
    """Rank that failed first; ``None``: no rank is the cause, or it is unknown which one is."""
    run: str | None
    """Id of that rank's run; ``None`` if it is this run, or if ``rank`` is ``None``."""
    status: Status
    """How the rank that failed first ended."""
    title: str
    """First line about the training's end."""
    text: str
    """Remark on the other ranks."""
    verdict: str = ""
    """Verdict on the memory of the other rank that failed first; empty if ``run`` is ``None``."""
    outcome: Literal["finding", "steady", "unsure", "too few steps"] | None = None
    """Kind of ``verdict``."""


SavingWay: TypeAlias = Literal[
    "state_dict",
    "deepcopy",
    "cpu_copies",
    "torch_save",
    "torch_save_buffer",
    "dcp_save",
    "dcp_async_save",
    "full_state_dict",
    "full_state_dict_on_device",
    "save_pretrained",
    "transformers_trainer",
    "lightning",
]
"""Way of saving a checkpoint; `memlog.facts.later_memory` has the calls."""


class SavedTensors(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of tensors that one ``state_dict()`` has. Storages count once, also if several tensors share one.

    A tensor that is distributed over several processes counts with this process's part.
    """

    host: Int
    """Storages in the host's memory."""
    device: Int
    """Storages on devices."""
    largest: Int
    """Largest storage on a device."""
    buffered: Int
    """Highest number of bytes while the storages are copied to one buffer in the host's memory, one after the
    other. A storage on a device is first copied to the host."""
    small: Int
    """Storages on devices of less than 32 MiB. If they are copied to the host one after the other, the C
    library may not free the copies at once."""
    copied: Int
    """Copies that ``dcp.save`` keeps on the host until it has written its file: those from a CUDA device are
    in page-locked memory, each in a block of a power of two."""
    whole: Int
    """Whole tensors of which this process has parts, and which are gathered on a device."""
    undivided: Int
    """Tensors on devices that are not distributed."""
    gathered: Int
    """Device memory to gather the whole tensor that takes most; 0: none is gathered on a device."""
    sharded: Int
    """Parts of tensors that no other process has."""
    whole_on_host: Int = 0
    """Whole tensors of which this process has parts, and which are gathered on the host."""
    gathered_on_host: Int = 0
    """Highest number of bytes while whole tensors are gathered on the host, one after the other, and kept; 0:
    none is gathered there."""


class SavedState(msgspec.Struct, frozen=True, array_like=True, tag="saved_state"):
    """Size of what a checkpoint saves, published once, after the optimizer's first step."""

    time_us: Int
    step: Int | None
    """Last completed step."""
    model: SavedTensors
    optimizer: SavedTensors
    whole_model: bool
    """False if ``model`` has only the parameters that the optimizer changes, without buffers and without
    parameters that are not trained: no other ones are known."""
    ranks: Int = 1
    """Number of processes that train together."""
    dcp_keeps_copies: bool = True
    """False if the installed torch frees each copy in ``dcp.save`` when the copy is written."""
    safetensors_copies: bool = False
    """True if the installed safetensors copies all tensors of a file to Python's bytes (before 0.8)."""
    shard: Int = 50_000_000_000
    """Maximum bytes of a file of ``save_pretrained``."""
    way: SavingWay | None = None
    """Way in which the trainer will save; ``None``: unknown."""
    first_at: Int | None = None
    """Step after which the trainer saves first; ``None``: unknown."""
