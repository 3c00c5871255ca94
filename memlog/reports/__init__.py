"""Reports on a run, made from its journal: summary, comparison, advice, post-mortem."""

from memlog.reports.schema import Summary
from memlog.reports.summary import encode, summarize

__all__ = ["Summary", "encode", "summarize"]
