"""Temporary buffers of operations on a CUDA device, for fake tensors. They are computed from shapes.

torch's CUDA kernels allocate buffers inside one operation, such as the partial sums of a reduction, and free
them at its end. An operation on fake tensors allocates none. The buffers' sizes follow from shapes, types and
strides, and from properties of the GPU. `TEMPORARIES` has a function for each operation that has buffers. The
functions follow torch's sources (torch 2.13), and are tested against torch's own allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from memlog.estimates.cuda_kernels import attention, layers, losses, reductions, sorting
from memlog.estimates.cuda_kernels.reductions import Call, Gpu, Temporaries
from memlog.torchside.internals import operation_name
from memlog.tracer.engines import op_workspace
from memlog.tracer.engines.op_workspace import Workspace
from memlog.tracer.engines.simulated_step import SIMULATED

_TABLES: Final = (reductions, attention, layers, losses, sorting)
TEMPORARIES: Final[Mapping[str, Temporaries]] = {
    name: temporaries for table in _TABLES for name, temporaries in table.TEMPORARIES.items()
}
"""Functions by an operation's name, without the underscore at the end."""
ORDERS: Final = {
    name: order for table in (layers, losses, sorting) for name, order in table.ORDERS.items()
}
_BY_LIBRARIES: Final = frozenset(
    (
        "convolution",
        "convolution_backward",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    )
)
"""Operations that also take workspaces whose sizes only cuDNN knows."""
_OF_LIBRARIES: Final = ("_linalg_", "linalg_", "_fft_", "lu_", "cholesky_")
"""Beginnings of the names of operations with workspaces of cuSOLVER or cuFFT."""
_WITHOUT: Final = ("linalg_cross", "linalg_vector_norm")
_UNKNOWN_NAMES: Final = """
    geqrf ormqr triangular_solve median nanmedian mode multinomial isin _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _trilinear masked_scatter_backward embedding_renorm
    deform_conv2d _deform_conv2d_backward
"""
_UNKNOWN: Final = frozenset(_UNKNOWN_NAMES.split())
"""Operations with buffers of their own for which `TEMPORARIES` has no function."""
_NONE: Final = Workspace(0, 0)


@contextmanager
def computed_from_shapes(gpu: Gpu) -> Iterator[None]:
    """Inside the block, compute the buffers of traced operations on fake tensors, for kernels on ``gpu``."""
    # Buffers also depend on what a key of shapes lacks, such as an offset in a storage.
    with SIMULATED.knowing(measure_fakes=partial(workspace, gpu), once_a_shape=False):
        yield


def workspace(gpu: Gpu, func: Any, args: Any, kwargs: Any, out: Any) -> Workspace | None:
    """Return the buffers of an operation on fake tensors; ``None`` if they can't be known."""
    name = operation_name(func).rstrip("_")
    by_library = name.startswith(_OF_LIBRARIES) and name not in _WITHOUT
    complete = not by_library and name not in _BY_LIBRARIES and name not in _UNKNOWN
    compute = TEMPORARIES.get(name)
    if compute is None:
        return _NONE if complete else None
    call = Call(gpu, func, args, kwargs, out)
    order: tuple[int, ...] = ()
    try:
        blocks = compute(call)
        if name in ORDERS:
            order = ORDERS[name](call)
    except Exception:  # noqa: BLE001 - arguments of another form, such as sparse tensors: it is named
        return None
    return op_workspace.workspace_of(blocks)._replace(blocks=blocks, complete=complete, order=order)
