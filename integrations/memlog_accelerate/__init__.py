"""memlog as a tracker of Hugging Face's ``accelerate``: `MemlogTracker`.

Importing this package installs two hooks. One marks an Accelerator's checkpoints as a phase. The other lets
`MemlogTracker` also record the ranks on which an Accelerator creates no tracker.
"""

from memlog_accelerate.hooks import install
from memlog_accelerate.tracker import MemlogTracker

__all__ = ["MemlogTracker"]

install()
