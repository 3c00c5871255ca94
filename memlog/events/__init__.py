"""The events of a run, and the place of each in the training loop.

::

    memlog.init()                                   Run, Origin
    ├─ for epoch in …:
    │   ├─ for batch in …:
    │   │   ├─ loss = model(x)
    │   │   ├─ loss.backward()
    │   │   └─ optimizer.step()                     Device (first seen), Parameters (once), Batch,
    │   │        │                                  SavedState (once)
    │   │        └─ the loss, when it is known      Loss
    │   └─ end of the epoch                         Epoch
    ├─ minimize(loss_function):
    │   └─ every call of loss_function              Evaluation
    ├─ a watched block or function                  Scope
    ├─ a point recorded by hand                     Recorded
    ├─ end of a phase of the program                Phase
    ├─ a rule's threshold is crossed                Alert
    ├─ a step was traced                            Trace
    ├─ a cause of high or growing memory was found  Finding
    ├─ the search for a cause begins or ends        Inquiry
    ├─ some steps, and while growth is examined     HeapReading
    ├─ the pinned memory has changed                PinnedMemory (at most about once a second)
    ├─ a step raised the run's peak by 5 % or more  StepInputs
    ├─ the peak follows the size of an input        PeaksBySize (when a larger size was seen)
    ├─ an allocation failed                         OutOfMemory
    ├─ a file was saved in the run's folder         Artifact
    ├─ the helper process has read memory           Sample (about once a second)
    ├─ all ranks have completed a step              Ranks (in the run of rank 0)
    ├─ a rank of the training has failed            RankFailure (in the run of rank 0)
    ├─ memlog's own cost and errors                 Health (every ten seconds)
    memlog.finish()                                 End

Every event is an immutable record. The journal stores it as a JSON array that begins with the event's tag.
The header of a journal segment names the fields. All sizes are bytes, all times are Unix time in
microseconds, ``None`` means unknown.

New fields are added only at the end and with a default. An older reader then ignores the fields that a newer
writer adds. Any other change of the format increases ``SCHEMA_VERSION``.

Axes: ``step`` counts optimizer steps, ``evaluation`` counts calls of a loss function, ``epoch`` counts
epochs. These are three separate axes.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

import msgspec

from memlog.events.findings import (
    CUT,
    CUT_BRIEFLY,
    OF_FINDING,
    Activity,
    Alert,
    DeviceProcess,
    DeviceState,
    Finding,
    GraphInUse,
    HeapReading,
    HeldTensors,
    Inquiry,
    OutOfMemory,
    PeaksBySize,
    SampleLengths,
    StepInputs,
    Trace,
    TracedLayer,
    TracedLine,
)
from memlog.events.measurements import (
    Batch,
    Epoch,
    Evaluation,
    Loss,
    Phase,
    PinnedMemory,
    Ranks,
    RankSpread,
    Recorded,
    Sample,
    Scope,
    ThreadStep,
    UsersNumber,
)
from memlog.events.memory import (
    ALLOCATED,
    AVAILABLE,
    CGROUP,
    DEVICE_USED,
    HOST_ANON,
    HOST_PEAKS,
    HOST_PINNED,
    HOST_RSS,
    OF_OTHERS,
    OTHER_PROCESSES,
    RESERVED,
    SAMPLED,
    SHARED,
    TREE,
    Reading,
    changes,
    main_reading,
    main_readings,
    peak_readings,
    readings,
)
from memlog.events.parts import (
    ChildReading,
    DeviceReading,
    DeviceUse,
    Int,
    PeakSource,
    Status,
    TensorInput,
    now_us,
)
from memlog.events.run import (
    LOST_CONNECTION,
    POSTMORTEM_FILE,
    POSTMORTEM_KIND,
    REPORT_FILE,
    REPORT_KIND,
    Artifact,
    Device,
    End,
    Exit,
    Health,
    Origin,
    Parameters,
    RankDoubt,
    RankFailure,
    Run,
    SavedState,
    SavedTensors,
    SavingWay,
)

__all__ = [
    "ALLOCATED",
    "AVAILABLE",
    "CGROUP",
    "CUT",
    "CUT_BRIEFLY",
    "DEVICE_USED",
    "EVENT_TYPES",
    "HOST_ANON",
    "HOST_PEAKS",
    "HOST_PINNED",
    "HOST_RSS",
    "LOST_CONNECTION",
    "OF_FINDING",
    "OF_OTHERS",
    "OTHER_PROCESSES",
    "POSTMORTEM_FILE",
    "POSTMORTEM_KIND",
    "REPORT_FILE",
    "REPORT_KIND",
    "RESERVED",
    "SAMPLED",
    "SCHEMA_VERSION",
    "SHARED",
    "TREE",
    "Activity",
    "Alert",
    "Artifact",
    "Batch",
    "ChildReading",
    "Device",
    "DeviceProcess",
    "DeviceReading",
    "DeviceState",
    "DeviceUse",
    "End",
    "Epoch",
    "Evaluation",
    "Event",
    "Exit",
    "Finding",
    "GraphInUse",
    "Health",
    "HeapReading",
    "HeldTensors",
    "Inquiry",
    "Int",
    "Loss",
    "Origin",
    "OutOfMemory",
    "Parameters",
    "PeakSource",
    "PeaksBySize",
    "Phase",
    "PinnedMemory",
    "RankDoubt",
    "RankFailure",
    "RankSpread",
    "Ranks",
    "Reading",
    "Recorded",
    "Run",
    "Sample",
    "SampleLengths",
    "SavedState",
    "SavedTensors",
    "SavingWay",
    "Scope",
    "Status",
    "StepInputs",
    "TensorInput",
    "ThreadStep",
    "Trace",
    "TracedLayer",
    "TracedLine",
    "UsersNumber",
    "changes",
    "field_names",
    "main_reading",
    "main_readings",
    "now_us",
    "peak_readings",
    "readings",
]

SCHEMA_VERSION = 1

Event: TypeAlias = (
    Run
    | Parameters
    | Device
    | Batch
    | Loss
    | Epoch
    | Evaluation
    | Scope
    | Recorded
    | Phase
    | ThreadStep
    | UsersNumber
    | Alert
    | Artifact
    | Trace
    | Finding
    | Inquiry
    | HeapReading
    | PinnedMemory
    | SavedState
    | StepInputs
    | PeaksBySize
    | OutOfMemory
    | Sample
    | Ranks
    | Health
    | Exit
    | RankFailure
    | RankDoubt
    | End
    | Origin
)

EVENT_TYPES: tuple[type[msgspec.Struct], ...] = get_args(Event)


def field_names() -> dict[str, tuple[str, ...]]:
    """Return the names of all fields, in the order in which the journal stores them.

    Returns:
        Field names. The key of an event is its tag. The key of a struct inside events, such as
        `DeviceReading`, is its class name.
    """
    named = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in EVENT_TYPES}
    parts: tuple[type[msgspec.Struct], ...] = (
        DeviceReading,
        TracedLayer,
        TracedLine,
        TensorInput,
        ChildReading,
        DeviceUse,
        RankSpread,
        DeviceProcess,
        DeviceState,
        SavedTensors,
        SampleLengths,
    )
    return {**named, **{part.__name__: part.__struct_fields__ for part in parts}}
