"""Shapes of the inputs of the largest training steps, and of a step that failed.

The inputs are read from the variables of the program's frames, so a model needs no hooks.
"""
