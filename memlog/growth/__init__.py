"""Growth of a series of memory levels: the one test behind rules with ``grows``, reports and findings.

After each training step the same objects should be alive. `lasting` tests whether the levels of a window
grow throughout. `regime` finds the step since which they grow, and the rate with its interval. `windows`
keeps the levels of a long run at several scales, in bounded memory.
"""

from memlog.growth.lasting import FEW, SIGMAS, Trend, keeps_growing, trend
from memlog.growth.regime import Growth, find_growth
from memlog.growth.windows import JOINED, MOST, LevelScales, LevelWindow

__all__ = [
    "FEW",
    "JOINED",
    "MOST",
    "SIGMAS",
    "Growth",
    "LevelScales",
    "LevelWindow",
    "Trend",
    "find_growth",
    "keeps_growing",
    "trend",
]
