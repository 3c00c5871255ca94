"""The engine for CUDA and XPU: reads the allocator's own history."""
