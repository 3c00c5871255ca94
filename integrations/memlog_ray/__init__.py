"""memlog's integration with Ray Train: `MemlogCallback` records each worker of a run."""

from memlog_ray.callback import MemlogCallback

__all__ = ["MemlogCallback"]
