"""Analysis of a trace. All engines record the same kind of event stream, so one analysis serves them all.

This package does not import torch.
"""
