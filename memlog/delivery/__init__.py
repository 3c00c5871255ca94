"""Delivery from the journal to the trackers, outside the training loop.

`helper` contains the helper process, which runs beside the trainer, and the helper's client in the training
process. `uploader` sends a journal to one tracker. It runs in the helper process and in ``memlog sync``. If
only the training process can write to a run, `memlog.in_process` writes to that run.
"""
