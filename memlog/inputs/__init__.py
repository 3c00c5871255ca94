"""Shapes of the inputs of a training step: of the largest, and of one that failed.

They are read from the variables of the program's frames, so a model needs no hooks.
"""
