"""Advice for causes of a failed allocation on a device."""

EXPANDABLE = (
    "`PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9: `PYTORCH_CUDA_ALLOC_CONF`)"
)

GRAPHS = (
    "Graphs that replay in the order of their captures can share one pool: `torch.cuda.graph(second, "
    "pool=first.pool())`. Fewer graphs, such as for fewer batch sizes, need less."
)

MEM_POOL = (
    "Memory of a `torch.cuda.MemPool` serves only allocations under `torch.cuda.use_mem_pool`. Delete the "
    "pool and its tensors if they are no longer needed; `MemPool(use_on_oom=True)` lets other allocations "
    "use it before memory runs out."
)

PINNED = (
    "PyTorch rounds a block of pinned memory up to a power of two, and keeps freed blocks. Pin fewer or "
    "smaller tensors, such as with a smaller `prefetch_factor`, or use `DataLoader(pin_memory=False)`. In "
    "torch 2.13, `PYTORCH_ALLOC_CONF=pinned_max_cached_size_mb:N` neither rounds nor keeps blocks over N MiB."
)

NO_GRAD = (
    "Evaluate under `with torch.no_grad():` or `torch.inference_mode()`; `model.eval()` alone does not "
    "switch gradients off."
)

STATE = (
    "A smaller batch does not help here: the optimizer's state has the same size for every batch. Use an "
    "optimizer with less state (Adam keeps two numbers for each parameter, SGD with momentum one), an 8-bit "
    "optimizer (a quarter of the bytes), or sharding (FSDP, ZeRO)."
)

MODEL = (
    "A smaller batch does not help here: the parameters and buffers alone do not fit. Load them in "
    "`torch.bfloat16` (half the bytes), use a smaller model, or shard it "
    "(`torch.distributed.fsdp.fully_shard`). `memlog.estimate` tells what training it takes."
)

COPY = (
    "Copy to the host's memory: `{name: value.cpu() for name, value in model.state_dict().items()}`. "
    "`torch.save(model.state_dict(), path)` needs no copy on the device."
)

BUCKETS = (
    "DistributedDataParallel needs its buckets beside the parameters. `torch.distributed.fsdp.fully_shard` "
    "divides parameters, gradients and optimizer state among the devices. With "
    "`gradient_as_bucket_view=True` the buckets stay, but the gradients take no memory of their own."
)

CACHE = (
    "The cache of keys and values grows with the batch and with each token: generate for fewer sequences at "
    "once, limit `max_new_tokens`, or use a smaller or quantized cache."
)

END_OTHERS = (
    "`nvidia-smi` lists the processes on the device. End those that are not needed, such as a notebook's "
    "kernel or an earlier run, or train on another device (`CUDA_VISIBLE_DEVICES`)."
)

OWN_DEVICE = (
    "Give each rank a device of its own: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before its "
    "first tensor, and `map_location` for `torch.load`."
)

EVALUATION = (
    "A smaller batch for the evaluation, and results moved to the host (`.cpu()`), need less."
)

BOTH = "Both limits stop this request, so that it needs both of these remedies."

PAGES = (
    "With expandable segments, the allocator returns only whole pages to the driver (20 MiB for large "
    "tensors, 2 MiB for small ones), and a tensor that stays alive holds its page. Make the sizes of tensors "
    "vary less: pad inputs to a few lengths, and make tensors that stay alive before those of the steps."
)

STREAMS = (
    "Memory that was allocated on one stream can only be used again on this stream. Allocate large tensors "
    "on as few streams as possible; `tensor.record_stream(stream)` lets another stream use a tensor safely."
)

HELD = (
    "Hold fewer of these tensors on the device at a time: load or compute them later, move them to the host "
    "(`.cpu()`), or remove those that are no longer needed."
)

KEPT_GRAPH = (
    "A graph keeps the activations of its forward pass until `backward()`. To accumulate gradients, call "
    "`(loss / n).backward()` for each batch in place of one call for the sum. In a recurrent network, "
    "`hidden.detach()` after some steps ends the graph."
)

FOR_TEMPORARY = (
    "A smaller batch does not help here: an optimizer's step needs memory by the size of the parameters. "
    "`fused=True` or `foreach=False` avoids temporary copies, which torch's optimizers make of all "
    "parameters of a device by default. An optimizer with less state, an 8-bit optimizer or sharding (FSDP, "
    "ZeRO) needs less in every step."
)
