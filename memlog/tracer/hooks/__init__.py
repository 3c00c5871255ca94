"""Hooks on modules, optimizers and autograd."""
