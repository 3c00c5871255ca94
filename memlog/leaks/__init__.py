"""Growth of memory, found by default: which series grows, since when, how fast, and until when."""
