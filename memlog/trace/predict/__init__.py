"""What a traced step would need if something about it were different.

No model runs here: a trace's stream of events says when each storage was made, by whom and when it went,
and each change makes some of them smaller, or live for another time. The highest level of what comes of that
is the predicted peak.
"""

from memlog.trace.predict.hints import WORTH, Advice, Hint, advise, steady_peak_of

__all__ = ["WORTH", "Advice", "Hint", "advise", "steady_peak_of"]
