"""How a window records: by dispatch mode, by the allocator's history, or by hooks and samples."""
