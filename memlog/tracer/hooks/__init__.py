"""Hooks in modules, optimizers and autograd."""
