"""Predictions of a traced step's peak after one change (batch size, checkpointing, precision, optimizer).

No model runs here. A trace's stream of events shows when each storage was allocated and freed, and by which
layer. A predicted change makes some storages smaller, or moves their begin or end. The predicted peak is the
highest number of live bytes after the change.
"""

from memlog.trace.predict.hints import WORTH, Advice, Hint, advise, steady_peak_of

__all__ = ["WORTH", "Advice", "Hint", "advise", "steady_peak_of"]
