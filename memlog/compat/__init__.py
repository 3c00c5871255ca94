"""Replacements of older modules: a program changes only its import line.

==============================================  ==============================================
before                                          now
==============================================  ==============================================
``from src.utils.memory_monitor import …``      ``from memlog.compat.memory_monitor import …``
``from gpu_optimizer import …``                 ``from memlog.compat.gpu_optimizer import …``
``src/utils/gpu_memory_profiler.py``            ``from memlog.compat.gpu_memory_profiler import …``
==============================================  ==============================================
"""
