"""The engine for CUDA: the allocator's own history."""
