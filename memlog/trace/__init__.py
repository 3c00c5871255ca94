"""What a trace says: one stream of events, one analysis of it, whichever engine recorded it.

Nothing here imports torch.
"""
