"""memlog's integration with Hydra: one run for each job, also in a multirun.

Add this to the configuration, or to one of its groups::

    hydra:
      callbacks:
        memlog: {_target_: memlog_hydra.MemlogCallback, backend: mlflow}
"""

from memlog_hydra.callback import MemlogCallback

__all__ = ["MemlogCallback"]
