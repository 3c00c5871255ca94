"""Engines that record a window: dispatch mode (CPU), allocator history (CUDA, XPU), or sampling."""
