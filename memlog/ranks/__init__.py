"""Ranks of one training: which runs are theirs, their memory side by side, and which of them ended first.

Each rank has its own run. A file in the run's folder names its place (`registration`). All else is read from
the ranks' journals, so no rank waits for another, and no process group is used.
"""
