"""memlog's integration with Hydra: one run for each job, of a multirun too.

In the configuration, or in any of its groups::

    hydra:
      callbacks:
        memlog: {_target_: memlog_hydra.MemlogCallback, backend: mlflow}
"""

from memlog_hydra.callback import MemlogCallback

__all__ = ["MemlogCallback"]
