"""Copies of matrices whose layout cuBLAS can't read.

Sources: ``cuda/Blas.cpp`` in torch's ``aten/src/ATen/native``.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from memlog.estimates.cuda_kernels.call import Blocks, Call, Temporaries, beside, bytes_of


def _readable(rows: int, columns: int, row: int, column: int) -> bool:
    """Return whether the values of rows or of columns are side by side (``prepare_matrix_for_cublas``).

    ``row``, ``column``: Strides.
    """
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def _copied(matrix: Tensor) -> int:
    readable = _readable(*matrix.shape[-2:], *matrix.stride()[-2:])
    return 0 if readable else bytes_of(matrix)


def _product(one: str, other: str) -> Temporaries:
    """Return the function for a product. The second matrix is copied first: cuBLAS counts by columns."""

    def copies(call: Call) -> Blocks:
        return beside(_copied(call[other]), _copied(call[one]))

    return copies


TEMPORARIES: Final[dict[str, Temporaries]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    "mv": lambda call: beside(_copied(call["self"])),
}
