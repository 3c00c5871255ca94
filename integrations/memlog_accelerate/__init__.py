"""memlog as a tracker of Hugging Face's ``accelerate``: `MemlogTracker`.

Importing this package also marks an Accelerator's checkpoints as a phase, and lets `MemlogTracker` record the
ranks on which an Accelerator makes no tracker.
"""

from memlog_accelerate.hooks import install
from memlog_accelerate.tracker import MemlogTracker

__all__ = ["MemlogTracker"]

install()
