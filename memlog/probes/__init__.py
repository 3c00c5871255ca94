"""The room where numbers are read: this process, its tree, its cgroup, its accelerators.

Two kinds of probes live here. ``host`` and ``accelerator`` are read on the trainer's thread at
every boundary and cost microseconds; ``tree`` and ``cgroup`` are dear, and the helper process reads
them about once a second. What can't be known is ``None``, and nothing here resets a statistic,
initialises a device or waits for one.
"""
