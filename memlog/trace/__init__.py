"""Analysis of a trace: one stream of events, whichever engine recorded it, and one analysis of that stream.

This package does not import torch.
"""
