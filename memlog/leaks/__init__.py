"""Detection of growing memory, on by default: the growing series, its first step, its limit, its holders."""
