"""The modules that memlog takes over, under the names of their contents: an old import is a one-line change.

==============================================  ==============================================
before                                          now
==============================================  ==============================================
``from src.utils.memory_monitor import …``      ``from memlog.compat.memory_monitor import …``
==============================================  ==============================================
"""
