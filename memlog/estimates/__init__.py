"""Estimates of a training step's memory before it runs: on fake tensors, which have shapes but no bytes."""

from memlog.estimates.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate"]
