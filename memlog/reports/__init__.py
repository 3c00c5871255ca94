"""What a journal says, put together for people and programs."""

from memlog.reports.schema import Summary
from memlog.reports.summary import DeliveryState, encode, summarize

__all__ = ["DeliveryState", "Summary", "encode", "summarize"]
