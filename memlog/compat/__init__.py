"""The modules that memlog takes over, under the names of their contents: an old import is a one-line change.

==============================================  ==============================================
before                                          now
==============================================  ==============================================
``from src.utils.memory_monitor import …``      ``from memlog.compat.memory_monitor import …``
``from gpu_optimizer import …``                 ``from memlog.compat.gpu_optimizer import …``
``src/utils/gpu_memory_profiler.py``            ``from memlog.compat.gpu_memory_profiler import …``
==============================================  ==============================================
"""
