"""Detection of growing memory, on by default.

It finds which series grows, since which step, when the series reaches its limit, and what holds the memory.
"""
