"""Delivery from the journal to the trackers, outside the training loop.

`helper` is the process beside the trainer, and its client in the trainer's process. `uploader` sends a
journal to one tracker, in the helper process and in ``memlog sync``. To a run that only the trainer's process
can write to, `memlog.in_process` writes.
"""
