"""Engines that record a window, by a dispatch mode (CPU), allocator history (CUDA, XPU) or sampling."""
