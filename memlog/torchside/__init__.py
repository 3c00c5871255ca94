"""The only room that names private parts of torch.

torch may change them at any time. `MISSING` has each of them, and what memlog does if this version of torch
lacks it. Training goes on in every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

MISSING: Final[Mapping[str, Sequence[str]]] = {
    "steps on the CPU are sampled, without the memory of layers": (
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch.autograd._get_sequence_nr",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    ),
    "no step is traced on the CPU, and memlog says so": (
        "torch.utils._python_dispatch._pop_mode",
        "torch.utils._python_dispatch._push_mode",
    ),
    "`layers=True` traces no step, and the search for leaks names no holder; memlog says so": (
        "torch._C.DisableTorchFunction",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C.TensorBase",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ),
    "traces leave out operations on the CPU, and say that they are incomplete": (
        "torch._C._dispatch_has_kernel_for_dispatch_key",
    ),
    "a part of the program that the part would recognise is traced as if it were plain code": (
        "torch._C._functorch.get_unwrapped",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch._ops._higher_order_ops",
        "torch._mkldnn",
        "torch._subclasses.fake_tensor",
        "torch.autograd._profiler_enabled",
        "torch.distributed.fsdp._fully_shard.",
    ),
    "workspaces inside operations on the CPU are not measured, and traces say so": (
        "torch._C._autograd._disable_profiler_legacy",
        "torch._C._autograd._enable_profiler_legacy",
        "torch._C._profiler._ExperimentalConfig",
        "torch._C._profiler._RecordFunctionFast",
    ),
    "oneDNN counts as used": (
        "torch._C._get_mkldnn_enabled",
        "torch._C._set_mkldnn_enabled",
    ),
    "oneDNN's copies are those of the default precision": (
        "torch._C._get_fp32_precision_getter",
        "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    ),
    "compiled code is traced less exactly, as with older versions of torch": (
        "torch._C._dynamo.eval_frame",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._dynamo.eval_frame",
        "torch._dynamo.trace_rules",
        "torch._dynamo.utils",
        "torch._inductor.output_code",
        "torch.export.pt2_archive._package",
    ),
    "figures of the device come from torch's public functions, which take longer": (
        "torch._C._KIND_memoryStats",
    ),
    "the allocator's settings are those of its environment variable": (
        "torch._C._accelerator_getAllocatorSettings",
    ),
    "memlog takes the device's history of allocations for its own": (
        "torch._C._KIND_isHistoryEnabled",
    ),
    "a failed allocation is described from its exception, without a snapshot": (
        "torch._C._cuda_attach_out_of_memory_observer",
        "torch.cuda.memory._snapshot",
    ),
    "workers of data loaders are known by their processes alone": (
        "torch.utils.data._utils.signal_handling",
    ),
    "`memlog estimate` says which part is missing": (
        "torch.Tensor._make_subclass",
        "torch._C.DispatchKey.AutocastCPU",
        "torch._C.DispatchKeySet",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableTorchDispatch",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._disabled_torch_function_impl",
        "torch._C._dispatch_get_all_op_names",
        "torch._C._nn._parse_to",
        "torch._C._set_warn_deprecated_on_mutable_data_ptr",
        "torch._VF",
        "torch._ops.OpOverload",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.UnsupportedOperatorException",
        "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
        "torch.nn.init._no_grad_trunc_normal_",
        "torch.optim.optimizer._foreach_supported_types",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils.data.dataloader._BaseDataLoaderIter",
    ),
    "`memlog estimate --ranks` says which part is missing": (
        "torch.distributed._composable.replicate_with_fsdp",
        "torch.distributed.device_mesh._get_device_handle",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed.tensor._random",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        "torch.ops._c10d_functional.wait_tensor.default",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
    ),
    "`memlog estimate` refuses compiled steps, with the reason": (
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._dynamo.backends.debugging",
        "torch._dynamo.config",
        "torch._dynamo.convert_frame.catch_errors_wrapper",
        "torch._dynamo.convert_frame.convert_frame",
        "torch._dynamo.eval_frame._callback_from_stance",
        "torch._dynamo.hooks.Hooks",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.utils.clear_torch_function_mode_stack",
        "torch._dynamo.utils.get_torch_function_mode_stack",
        "torch._dynamo.utils.set_torch_function_mode_stack",
        "torch._functorch.config",
        "torch._inductor.config.get_config_copy",
        "torch._inductor.graph.GraphLowering",
    ),
}
"""What memlog does without a private part, and the parts. ``KIND`` is a device's type, such as ``cuda``."""
