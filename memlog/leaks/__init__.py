"""Growth of memory, found by default: which series grows, since when, until when, and what holds it."""
