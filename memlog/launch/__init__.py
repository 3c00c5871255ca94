"""``memlog run``: recording of a script without changes to it.

The launcher puts the folder ``site`` first on ``PYTHONPATH``. The ``sitecustomize`` in this folder runs at
the start of every Python process that the command starts. It waits for the import of torch's optimizers or of
memlog. After that import, `memlog.launch.starter` waits for the first step.
"""
