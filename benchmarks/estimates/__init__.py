"""How close estimates of a training step's memory are to what the allocator counts."""
