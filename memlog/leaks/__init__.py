"""Detection of growing memory, on by default.

memlog finds the memory that grows (such as a device's), the step at which the growth began, the step at which
the memory will reach its limit, and the holders of the memory.
"""
