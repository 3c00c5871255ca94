"""Readers of memory figures: this process, its process tree, its cgroup, its accelerators.

``host`` and ``accelerator`` are read on the trainer's thread at every step, in microseconds. ``tree``
and ``cgroup`` are slow, so the helper process reads them about once a second. An unknown figure is
``None``. No probe resets a statistic, initialises a device or waits for a device.
"""
