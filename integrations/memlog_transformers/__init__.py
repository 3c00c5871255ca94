"""memlog's integration with the Trainers of Hugging Face's ``transformers`` and of TRL.

Importing this package changes every ``Trainer`` of the process. A ``Trainer`` gets a `MemlogCallback` when it
begins to train. Its evaluations and checkpoints are marked as phases. A session imports this package as soon
as the script has imported ``transformers.trainer``, so the script needs no change. Without a session, each
``Trainer`` works as usual.
"""

from __future__ import annotations

from memlog_transformers.callback import MemlogCallback
from memlog_transformers.hooks import install

__all__ = ["MemlogCallback"]

install()
