"""Test whether a series of memory levels grows.

Alert rules with ``grows``, reports and findings use this test.

After each training step the same objects should be alive. `lasting` tests whether levels grow throughout, and
finds the step at which the growth began, its rate, and the rate's confidence interval.
`windows` keeps the levels of a long run at several scales, in bounded memory.
"""

from memlog.growth.lasting import (
    FEW,
    JOINED,
    MAX_LEVELS,
    SIGMAS,
    Growth,
    LevelScales,
    LevelWindow,
    find_growth,
    keeps_growing,
    trend,
)

__all__ = [
    "FEW",
    "JOINED",
    "MAX_LEVELS",
    "SIGMAS",
    "Growth",
    "LevelScales",
    "LevelWindow",
    "find_growth",
    "keeps_growing",
    "trend",
]
