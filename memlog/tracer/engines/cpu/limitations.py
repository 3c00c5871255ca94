"""What the CPU's engine can't see, in whole sentences."""

from __future__ import annotations

from typing import Final

ALWAYS: Final = (
    "What an operation allocates and frees inside itself is measured once for every shape; for views, "
    "pointwise operations, copies and fills it is taken to be nothing.",
    "Copies of a random number generator's state (5 kB each) are seen where torch.get_rng_state makes them, "
    "as checkpointing does; those of Generator.get_state are not.",
    "Memory that is not torch's (numpy, what a data loader's workers share, the interpreter, the allocator's "
    "own fragments) is not seen, but where a parameter or buffer lies on it.",
    "Tensors made before the trace are known only where they are the model's, an optimizer's or arguments "
    "of the model.",
    "Tensors made on other threads than the one that began the trace are not seen.",
)
SPARSE: Final = "Pointwise operations on sparse tensors take more inside: peaks are lower bounds."
COMPLEX: Final = (
    "Operations on complex tensors that are still to be conjugated copy them inside themselves, so that "
    "peaks are lower bounds."
)
NESTED: Final = (
    "What nested tensors keep of their shapes is not seen, so that peaks are lower bounds."
)
COMPILED: Final = (
    "Compiled code ran (torch.compile): what it allocates, and what it leaves behind, is seen only where "
    "operations of torch's take it up, so that peaks and what is live at the end are lower bounds."
)
LATE_GRADIENTS: Final = (
    "There are gradients that no operation on this thread has made (a backward pass on another one?): they "
    "count from when they were met, and nobody knows what was there while they were made."
)
PRECISION: Final = (
    "The precision of matrix products was changed meanwhile, which decides what operations take inside "
    "themselves, so that peaks are lower bounds."
)
FAILED: Final = (
    "Operations were not recorded because of an error in memlog, so that peaks are lower bounds."
)
TRANSFORMED: Final = (
    "Inside a transformation of torch.func (grad, vmap, jvp) all bytes are seen, but what belongs to its "
    "backward pass counts with the forward pass of what surrounds it."
)
