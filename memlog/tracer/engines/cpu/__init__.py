"""Engine for the CPU. A dispatch mode sees every operation."""
