"""Estimates of a training step's memory before the step runs.

Estimates use fake tensors, which have shapes but no bytes.
"""

from memlog.estimates.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
