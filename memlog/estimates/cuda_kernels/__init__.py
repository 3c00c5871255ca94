"""Temporary buffers that torch's CUDA kernels allocate inside one operation, computed from shapes."""
