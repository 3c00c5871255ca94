"""Noticing that memory ran out, in the process where it did: what was asked for, by which layer."""
