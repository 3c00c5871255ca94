"""``memlog run``: recording a script that was never touched.

The launcher puts the folder ``site`` first on ``PYTHONPATH``. The ``sitecustomize`` in it runs at the
start of every Python process below, and waits for torch's optimizers or memlog itself to be imported:
then `memlog.launch.starter` waits for the first step.
"""
