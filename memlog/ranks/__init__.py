"""Ranks of one training: the search for their runs, their memory side by side, and the rank that ended first.

Each rank has its own run. A file in the run's folder names the rank (`registration`). All other data is read
from the ranks' journals. So no rank waits for another, and no process group of torch is needed.
"""
