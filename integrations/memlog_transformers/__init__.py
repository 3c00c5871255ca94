"""memlog in a Trainer of Hugging Face's ``transformers`` and of TRL: `MemlogCallback`.

Importing this package also gives every ``Trainer`` of the process a `MemlogCallback` when it begins to train,
and marks its evaluations and checkpoints as phases. A session imports this package as soon as the script has
imported ``transformers.trainer``, so that an unchanged script is recorded. Without a session nothing happens.
"""

from __future__ import annotations

from memlog_transformers.callback import MemlogCallback
from memlog_transformers.hooks import install

__all__ = ["MemlogCallback"]

install()
