"""What a journal says, put together for people and programs."""

from memlog.analysis.document import Summary
from memlog.analysis.summary import DeliveryState, encode, summarize

__all__ = ["DeliveryState", "Summary", "encode", "summarize"]
