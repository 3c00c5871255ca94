"""Engine for CUDA and XPU. It reads the allocator's own history."""
