"""Interface of a tracker's integration, and the search for integrations by name.

An integration is a package of its own that registers one `Backend` under the entry point group
``memlog.sinks``. Its two halves run in two processes:

* The training process imports the `Backend`. So this import must not load the tracker's client. The backend
  finds the run that the user has opened, and collects the data that the client needs to connect.
* The backend opens a `Sink`. The sink runs in the helper process (or in ``memlog sync``) and sends data to
  the tracker. The `ArtifactStore` fetches files for ``memlog pull``.
"""

from __future__ import annotations

from memlog.sink.client_backend import (
    ClientBackend,
    ClientVariables,
    distinct_name,
    valid_text,
    written,
)
from memlog.sink.protocols import (
    CLOSING_PARAMETERS,
    DISABLED,
    LOCAL,
    OFFLINE,
    STEP_PREFIX,
    USERS_NUMBER,
    WEBHOOK,
    ArtifactStore,
    Axis,
    Backend,
    Connection,
    DescribingSink,
    EndingBackend,
    Fold,
    InProcessBackend,
    InProcessRun,
    JoinableBackend,
    NumberingBackend,
    Point,
    Resolution,
    ResumableBackend,
    Rows,
    Sink,
    StoredArtifact,
    Target,
    TrackerRun,
    writes_in_process,
)
from memlog.sink.search import (
    ENTRY_POINT_GROUP,
    backends_to_look_in,
    find_backends,
    home_of,
    is_installed,
    joins,
    load_backend,
)

__all__ = [
    "CLOSING_PARAMETERS",
    "DISABLED",
    "ENTRY_POINT_GROUP",
    "LOCAL",
    "OFFLINE",
    "STEP_PREFIX",
    "USERS_NUMBER",
    "WEBHOOK",
    "ArtifactStore",
    "Axis",
    "Backend",
    "ClientBackend",
    "ClientVariables",
    "Connection",
    "DescribingSink",
    "EndingBackend",
    "Fold",
    "InProcessBackend",
    "InProcessRun",
    "JoinableBackend",
    "NumberingBackend",
    "Point",
    "Resolution",
    "ResumableBackend",
    "Rows",
    "Sink",
    "StoredArtifact",
    "Target",
    "TrackerRun",
    "backends_to_look_in",
    "distinct_name",
    "find_backends",
    "home_of",
    "is_installed",
    "joins",
    "load_backend",
    "valid_text",
    "writes_in_process",
    "written",
]
