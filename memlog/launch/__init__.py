"""``memlog run``: recording of a script without changes to it.

The launcher puts the folder ``site`` first on ``PYTHONPATH``. Its ``sitecustomize`` runs at the start of
every Python process that the command starts, and waits for the import of torch's optimizers or of memlog.
Then `memlog.launch.starter` waits for the first step.
"""
