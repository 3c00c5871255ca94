"""The one place where the version stands; the wheel reads it from here."""

__version__ = "0.1.0"
