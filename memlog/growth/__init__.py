"""Growth of a series of memory levels: the one test behind rules with ``grows``, reports and findings.

A training step is a round trip: after each the same things should be alive. `lasting` tests whether the
levels of a window grow throughout; `regime` finds since when they do, how fast, and how sure that is;
`windows` keeps the levels of a long run at several scales, in bounded memory.
"""

from memlog.growth.lasting import FEW, Trend, keeps_growing, trend
from memlog.growth.regime import Growth, find_growth
from memlog.growth.windows import JOINED, MOST, LevelScales, LevelWindow

__all__ = [
    "FEW",
    "JOINED",
    "MOST",
    "Growth",
    "LevelScales",
    "LevelWindow",
    "Trend",
    "find_growth",
    "keeps_growing",
    "trend",
]
