"""Compiled code (``torch.compile``) in an estimate: Inductor plans its buffers, and no kernel runs.

Dynamo and AOTAutograd trace a step's fake tensors like real ones. Inductor then writes a Python wrapper that
makes each buffer, calls the kernels, and deletes or reuses the buffers. An estimate runs this wrapper on fake
tensors, with kernels that do nothing. So the buffers, their order, and the activations kept for the backward
pass are those of the real run. No kernel is compiled.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from memlog.errors import ConfigurationError

_MEMLOG: Final = str(Path(__file__).parents[1])
_KERNELS: Final = "async_compile = AsyncCompile()\n"
"""Line of Inductor's wrapper that makes the compiler of the kernels."""
_DROPPED_GUARDS: Final = (
    "TORCH_FUNCTION_STATE",  # compares the modes for torch's functions
    "torch_dot_nn_dot_modules_dot_module']._global_",  # compares the hooks for all modules
)
"""Parts of the names of Dynamo's guards that compare what memlog adds and removes during an estimate."""
_UNPLANNED: Final = (
    *("max_autotune", "max_autotune_gemm"),
    *("cpp_wrapper", "memory_planning", "freezing"),
)
"""Settings of Inductor with which the buffers depend on measured times, or the wrapper is another one."""
_EAGER: Final = "torch._dynamo.backends.debugging"
"""Module of the backends that run a graph's operations one by one."""
_WITHOUT: Final = "estimate the step without torch.compile, which usually takes more memory"

_planning: Final = set[int]()
"""Threads inside `planned_by_inductor`."""


def can_plan() -> bool:
    """Return whether this torch is new enough. Private parts of older versions are different."""
    return TorchVersion(torch.__version__) >= "2.13"


def is_planning() -> bool:
    """Return whether this thread is inside `planned_by_inductor`."""
    return threading.get_ident() in _planning


@contextmanager
def planned_by_inductor(*, on_cuda: bool = False) -> Iterator[None]:
    """Inside the block, this thread's compiled code runs as Inductor plans it for fake tensors.

    Enter a `FakeMode` inside the block. In a mode that was entered before, compiled functions run uncompiled.

    Code that the program has compiled before is not used. What is compiled here is forgotten afterwards. So a
    function of the step that the program had compiled is compiled once more when the program calls it again.

    Raises:
        ConfigurationError: What the compiled code allocates can't be known.
    """
    if not can_plan() or is_planning():
        yield
        return
    from torch._dynamo import eval_frame  # noqa: PLC0415 - torch's optimizers import it, too, when used

    planner = _Planner(eval_frame._callback_from_stance, on_cuda=on_cuda)
    _planning.add(threading.get_ident())
    try:
        with planner, patch.object(eval_frame, "_callback_from_stance", planner.callback):
            yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigurationError(
            f"torch.compile failed on fake tensors ({type(error).__name__}: {reason:.200}), so what the "
            f"compiled code allocates can't be known: {_WITHOUT}"
        ) from error
    finally:
        _planning.discard(threading.get_ident())


class _Planner:
    """Conversion of the frames that an estimate compiles, with kernels that do nothing."""

    def __init__(self, original: Callable[[Any], Any], *, on_cuda: bool) -> None:
        self._original = original
        self._on_cuda = on_cuda
        self._thread = threading.get_ident()
        self._converters: dict[int, tuple[Any, _Converter]] = {}
        self._codes = set[types.CodeType]()
        self._undo = ExitStack()

    def __enter__(self) -> None:
        self._undo.__enter__()

    def __exit__(self, *_: object) -> None:
        """Forget the code that was compiled: its kernels do nothing."""
        self._undo.close()
        for code in self._codes:
            torch._C._dynamo.eval_frame.reset_code(code)

    def callback(self, given: Any) -> Any:
        """Return the callback that compiles frames instead of ``given``, as Dynamo asks for it.

        Raises:
            ConfigurationError: What the compiled code allocates can't be known.
        """
        callback = self._original(given)
        if not callback or threading.get_ident() != self._thread:
            return callback
        backend = callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if id(backend) not in self._converters:
            try:
                if not self._converters:
                    self._start()
                self._refuse(backend)
                # The backend is kept, too. Otherwise another backend could get its `id`.
                self._converters[id(backend)] = backend, _Converter(backend, self._codes)
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(
                    f"torch {torch.__version__} compiles in a way that memlog doesn't know ({error}), so "
                    f"what the compiled code allocates can't be known: {_WITHOUT}"
                ) from error
        return self._converters[id(backend)][1]

    def _start(self) -> None:
        """Change torch's compiler. It is imported only if a step calls compiled code."""
        import torch._dynamo.config  # noqa: PLC0415 - see above
        import torch._functorch.config  # noqa: PLC0415 - see above
        import torch._inductor.graph  # noqa: PLC0415 - see above

        dynamo: Any = torch._dynamo.config
        # Past the limit, Dynamo would run the function uncompiled. Shapes of other batches, such as those of
        # other estimates, would make this batch's shapes symbols.
        changes = dynamo.patch(
            fail_on_recompile_limit_hit=True, suppress_errors=False, automatic_dynamic_shapes=False
        )
        self._undo.enter_context(changes)
        # A graph from the cache would run kernels, and this estimate's graphs must never get there.
        for config, names in (
            (torch._inductor.config, ("fx_graph_cache", "fx_graph_remote_cache")),
            (torch._functorch.config, ("enable_autograd_cache", "enable_remote_autograd_cache")),
        ):
            self._undo.enter_context(config.patch(dict.fromkeys(names, False)))
        lowering: Any = torch._inductor.graph.GraphLowering
        load = _loading(lowering._compile_to_module_lines, self._thread)
        self._undo.enter_context(patch.object(lowering, "_compile_to_module_lines", load))

    def _refuse(self, backend: Any) -> None:
        if self._on_cuda:
            raise ConfigurationError(
                "the step calls code compiled by torch.compile, and what it allocates on a CUDA device can't "
                f"be known without the device: {_WITHOUT}"
            )
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            raise ConfigurationError(
                "the step calls code compiled by torch.compile, and an estimate of one of several processes "
                f"can't plan it: {_WITHOUT}"
            )
        if type(backend).__name__ != "_TorchCompileInductorWrapper":
            function = getattr(backend, "compiler_fn", backend)
            if getattr(function, "__module__", None) != _EAGER:
                name = getattr(function, "__name__", type(function).__name__)
                raise ConfigurationError(
                    f"the step calls code compiled with the backend {name}, and what it allocates can't be "
                    f"known without running it: {_WITHOUT}"
                )
            return
        settings = torch._inductor.config.get_config_copy() | backend.config
        unplanned = [name for name in _UNPLANNED if settings.get(name)]
        if unplanned:
            raise ConfigurationError(
                f"the step calls code compiled with {', '.join(unplanned)}, and what it allocates can't be "
                f"known without running it: leave this option of torch.compile out, or {_WITHOUT}"
            )


class _Converter:
    """Callback with which Dynamo compiles a frame for fake tensors.

    Dynamo uses compiled code only for the backend that compiled it. Each estimate has its own.
    """

    def __init__(self, backend: Callable[..., Any], codes: set[types.CodeType]) -> None:
        from torch._dynamo import convert_frame  # noqa: PLC0415 - see `_Planner._start`
        from torch._dynamo.hooks import Hooks  # noqa: PLC0415 - see above

        def of_estimate(graph: Any, inputs: Any, **options: Any) -> Any:
            return backend(graph, inputs, **options)

        hooks = Hooks(guard_filter_fn=_kept)
        self._codes = codes
        self._torchdynamo_orig_backend = convert_frame.convert_frame(of_estimate, hooks)
        self._convert = convert_frame.catch_errors_wrapper(self._torchdynamo_orig_backend, hooks)

    def __call__(self, frame: Any, entry: Any, state: Any) -> Any:
        from torch._dynamo.types import ConvertFrameReturn  # noqa: PLC0415 - see `_Planner._start`

        if frame.f_code.co_filename.startswith(_MEMLOG):
            return ConvertFrameReturn()
        self._codes.add(frame.f_code)
        with _without_function_modes():
            return self._convert(frame, entry, state)


def _kept(guards: Sequence[Any]) -> list[bool]:
    names = [f"{guard.guard_type} {guard.name}" for guard in guards]
    return [not any(part in name for part in _DROPPED_GUARDS) for name in names]


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Run a block without modes for torch's functions. Dynamo would trace the code of memlog's modes."""
    from torch._dynamo import utils  # noqa: PLC0415 - see `_Planner._start`

    modes = utils.get_torch_function_mode_stack()
    utils.clear_torch_function_mode_stack()
    try:
        yield
    finally:
        utils.set_torch_function_mode_stack(modes)


def _loading(original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """Return a method of `GraphLowering` that loads a wrapper whose kernels do nothing."""

    def load(graph: Any, code: Any) -> Any:
        if threading.get_ident() != thread:
            return original(graph, code)
        if _KERNELS not in code.value:
            raise NotImplementedError("Inductor's wrapper has no compiler of kernels")
        # The method of torch sets these attributes, which its callers read.
        graph.cache_key = graph.cache_path = ""
        graph.cache_linemap = []
        module = types.ModuleType("memlog_plan")
        module.__file__ = ""
        names = vars(module)
        names.update(graph.constants, async_compile=_NoKernels())
        names.update(graph.torchbind_constants | graph.opaque_value_type_classes)
        exec(code.value.replace(_KERNELS, ""), names)  # noqa: S102 - torch runs the same text
        # This comes last, because the text defines both names itself.
        names.update(empty_strided_cpu=_empty, reinterpret_tensor=_reinterpreted)
        return module

    return load


class _NoKernels:
    """Replacement of Inductor's compiler of kernels. Its kernels do nothing."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda *_, **__: _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Run in place of a kernel, which only writes into the buffers that it gets."""


def _empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _reinterpreted(tensor: Tensor, shape: Any, strides: Any, offset: int) -> Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
