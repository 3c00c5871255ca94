"""The engine for the CPU: a dispatch mode sees every operation."""
