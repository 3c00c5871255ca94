"""Version of memlog. The wheel reads it from this file."""

__version__ = "0.1.0"
