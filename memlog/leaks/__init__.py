"""Detection of growing memory, on by default.

memlog finds which memory grows (such as a device's), since which step, at which step it will reach its limit,
and what holds it.
"""
