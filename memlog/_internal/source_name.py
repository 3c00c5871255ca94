"""Short names of source files."""

from __future__ import annotations

import sys
from pathlib import Path


def source_name(file: str) -> str:
    """Return a source file's name without the folder. For a notebook's cell, return text like ``cell In[3]``.

    IPython gives a cell a file name made of numbers, which tells a reader nothing.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # IPython 7 has no such method.
    format_code_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if format_code_name is None else format_code_name(file)
    return Path(file).name if cell is None else f"cell {cell[1]}"
