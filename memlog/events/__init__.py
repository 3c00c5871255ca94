"""The events of a run, and the place of each in the training loop.

::

    memlog.init()                                   Run, Origin
    ├─ for epoch in …:
    │   ├─ for batch in …:
    │   │   ├─ loss = model(x)
    │   │   ├─ loss.backward()
    │   │   └─ optimizer.step()                     Device (first seen), Parameters (once), Batch
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
    ├─ a step raised the run's peak by 5 % or more  StepInputs
    ├─ an allocation failed                         OutOfMemory
    ├─ a file was saved in the run's folder         Artifact
    ├─ the helper process has read memory           Sample (about once a second)
    ├─ all ranks have completed a step              Ranks (in the run of rank 0)
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
    OF_FINDING,
    Alert,
    Finding,
    OutOfMemory,
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
    Ranks,
    RankSpread,
    Recorded,
    Sample,
    Scope,
)
from memlog.events.readings import (
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
    REPORT_FILE,
    REPORT_KIND,
    Artifact,
    Device,
    End,
    Exit,
    Health,
    Origin,
    Parameters,
    Run,
)

__all__ = [
    "EVENT_TYPES",
    "OF_FINDING",
    "REPORT_FILE",
    "REPORT_KIND",
    "SCHEMA_VERSION",
    "Alert",
    "Artifact",
    "Batch",
    "ChildReading",
    "Device",
    "DeviceReading",
    "DeviceUse",
    "End",
    "Epoch",
    "Evaluation",
    "Event",
    "Exit",
    "Finding",
    "Health",
    "Int",
    "Loss",
    "Origin",
    "OutOfMemory",
    "Parameters",
    "PeakSource",
    "Phase",
    "RankSpread",
    "Ranks",
    "Recorded",
    "Run",
    "Sample",
    "Scope",
    "Status",
    "StepInputs",
    "TensorInput",
    "Trace",
    "TracedLayer",
    "TracedLine",
    "field_names",
    "now_us",
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
    | Alert
    | Artifact
    | Trace
    | Finding
    | StepInputs
    | OutOfMemory
    | Sample
    | Ranks
    | Health
    | Exit
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
    )
    return {**named, **{part.__name__: part.__struct_fields__ for part in parts}}
