"""Programs that run out of a CUDA device's memory, each in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PREFACE = """
import torch
from torch import nn

import memlog

MIB = 1024**2

def mlp(width=512, layers=4, device="cuda"):
    parts = ((nn.Linear(width, width, device=device), nn.GELU()) for _ in range(layers))
    return nn.Sequential(*(part for pair in parts for part in pair))

def step(model, optimizer, batch, width=512, device="cuda"):
    loss = model(torch.randn(batch, width, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def block(size):
    return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")

def begin(model=None, make=torch.optim.Adam, **options):
    model = mlp() if model is None else model
    optimizer = make(model.parameters())
    memlog.init("local", model=model, finish_timeout=60, **options)
    for _ in range(3):
        step(model, optimizer, 64)
    return model, optimizer
"""


class Way(NamedTuple):
    """A way to run out of memory, by its name in the documentation."""

    name: str
    program: str
    environment: Mapping[str, str] = {}
    also: tuple[str, ...] = ()
    """Texts that the report must have."""
    never: tuple[str, ...] = ()
    """Texts that would be wrong in the report."""
    other_process: int | None = None
    """MiB of the device that another process holds."""


_EXPANDABLE = "`PYTORCH_ALLOC_CONF=expandable_segments:True`"

WAYS = (
    Way(
        "a batch that is too large",
        """
        model, optimizer = begin(layers=True)
        step(model, optimizer, 131_072)
        """,
        also=(
            "A smaller batch",
            "Inputs of the step that failed: ",
            "131072\N{MULTIPLICATION SIGN}512",
        ),
        never=(_EXPANDABLE,),
    ),
    Way(
        "a leak",
        """
        model, optimizer = begin()
        history = []
        for _ in range(400):
            step(model, optimizer, 64)
            history.append(model(torch.randn(256, 512, device="cuda")).mean())
        """,
        never=(_EXPANDABLE, "smaller batch"),
    ),
    Way(
        "fragmentation",
        """
        model, optimizer = begin(layers=True)
        kept = []
        for _ in range(8):
            large = block(100)
            del large
            kept.append(block(60))
        block(300)
        """,
        also=(_EXPANDABLE,),
        never=("grew with its input", "smaller batch"),
    ),
    Way(
        "another process",
        """
        begin(layers=True)
        block(400)
        """,
        also=("nvidia-smi", "Process ", "other processes hold 700.0 MiB"),
        never=(_EXPANDABLE, "smaller batch", "grew with its input"),
        other_process=700,
    ),
    Way(
        "a memory fraction",
        """
        torch.cuda.set_per_process_memory_fraction(0.25)
        begin(layers=True)
        block(300)
        """,
        also=("a fraction of at least 0.3",),
        never=("another limit must have stopped it", "no limit and no smaller model"),
    ),
    Way(
        "a private pool",
        """
        begin()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            scratch = [block(100) for _ in range(6)]
        del scratch
        block(500)
        """,
        also=("MemPool(use_on_oom=True)",),
        never=(_EXPANDABLE,),
    ),
    Way(
        "pinned memory of the host",
        """
        import resource
        begin()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MIB, resource.RLIM_INFINITY))
        torch.empty(2048 * MIB, dtype=torch.uint8, pin_memory=True)
        """,
        also=("power of two",),
        never=("smaller model",),
    ),
    Way(
        "expandable segments, all of them in use",
        """
        model, optimizer = begin(layers=True)
        step(model, optimizer, 131_072)
        """,
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        also=("A smaller batch",),
        never=(_EXPANDABLE,),
    ),
    Way(
        "a second device",
        """
        class Halves(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = mlp(device="cuda:0"), mlp(device="cuda:1")
            def forward(self, x, copies=1):
                return self.second(self.first(x).to("cuda:1").repeat(copies, 1))
        model, optimizer = begin(Halves(), layers=True)
        model(torch.randn(64, 512, device="cuda:0"), 2048).square().mean().backward()
        """,
        environment={"FAKE_CUDA_DEVICES": "2"},
        also=("No traced step shows the memory of cuda1",),
        never=("From the newest traced step",),
    ),
    Way(
        "the backward pass",
        """
        from torch.utils.checkpoint import checkpoint
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = mlp(layers=8)
            def forward(self, x):
                return checkpoint(self.body, x, use_reentrant=False)
        model, optimizer = begin(Checkpointed(), layers=True)
        step(model, optimizer, 50_000)
        """,
        also=("It happened in the backward pass", "Inputs of the step that failed: "),
    ),
    Way(
        "the optimizer's first step",
        """
        model = mlp(4096, 5)
        optimizer = torch.optim.Adam(model.parameters())
        memlog.init("local", model=model, finish_timeout=60)
        step(model, optimizer, 8, 4096)
        """,
        also=("A smaller batch does not help",),
    ),
    Way(
        "an evaluation",
        """
        model, optimizer = begin()
        def evaluate(model):
            model.eval()
            return model(torch.randn(131_072, 512, device="cuda")).square().mean()
        evaluate(model)
        """,
        also=("torch.no_grad()",),
    ),
    Way(
        "an evaluation in a function `test`",
        """
        model, optimizer = begin()
        def test(model):
            model.eval()
            return model(torch.randn(131_072, 512, device="cuda")).sum().item()
        test(model)
        """,
        also=("torch.no_grad()",),
    ),
    Way(
        "a model that is too large",
        """
        memlog.init("local", finish_timeout=60)
        nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(20))).to("cuda")
        """,
        also=("A smaller batch does not help",),
    ),
    Way(
        "a copy for averages, with gradients",
        """
        import copy
        model = mlp(4096, 4)
        optimizer = torch.optim.SGD(model.parameters())
        memlog.init("local", model=model, finish_timeout=60)
        model(torch.randn(8, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        averages = [copy.deepcopy(model) for _ in range(4)]
        """,
        also=("value.cpu()",),
    ),
    Way(
        "a checkpoint",
        """
        model = mlp(4096, 4)
        optimizer = torch.optim.SGD(model.parameters())
        memlog.init("local", model=model, finish_timeout=60)
        step(model, optimizer, 8, 4096)
        def save(model):
            return {name: value.clone() for name, value in model.state_dict().items()}
        saved = [save(model) for _ in range(4)]
        """,
        also=("value.cpu()",),
    ),
    Way(
        "graphs of CUDA",
        """
        model, optimizer = begin()
        graphs = []
        for batch in (16384, 32768, 65536, 65536, 65536, 65536):
            x = torch.randn(batch, 512, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                y = model(x)
            graphs.append((graph, y))
        """,
        also=("pool=first.pool()",),
    ),
    Way(
        "buckets of DistributedDataParallel",
        """
        import tempfile
        store = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        model, optimizer = begin()
        large = mlp(4700, 13)
        ddp = nn.parallel.DistributedDataParallel(large)
        """,
        environment={"FAKE_CUDA_MEMORY": "2GiB"},
        also=("gradient_as_bucket_view=True",),
    ),
    Way(
        "an operation's temporary memory",
        """
        begin()
        x = torch.empty(36 * MIB, device="cuda")
        def order(x):
            return x.sort()
        order(x)
        """,
        also=("outside the model's layers",),
    ),
    Way(
        "generation",
        """
        model, optimizer = begin()
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(512, 1536)
            def forward(self, x, past=None):
                q, k, v = self.qkv(x).chunk(3, -1)
                if past is not None:
                    k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
                return nn.functional.scaled_dot_product_attention(q, k, v), (k, v)
        attention = Attention().cuda().eval()
        @torch.no_grad()
        def generate(x, tokens):
            past = None
            for _ in range(tokens):
                x, past = attention(x[:, -1:], past)
        generate(torch.randn(512, 1, 512, device="cuda"), 4000)
        """,
        also=("max_new_tokens",),
    ),
    Way(
        "a caught attempt, before another error",
        """
        model, optimizer = begin()
        try:
            step(model, optimizer, 131_072)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        raise KeyError("label")
        """,
    ),
    Way(
        "two threads",
        """
        from concurrent.futures import ThreadPoolExecutor
        model, optimizer = begin()
        held = []
        def serve():
            for _ in range(20):
                held.append(block(100))
        def train():
            for _ in range(200):
                step(model, optimizer, 64)
        with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
            training, serving = pool.submit(train), pool.submit(serve)
        serving.result()
        """,
    ),
    Way(
        "a child process",
        """
        import subprocess, sys
        begin()
        hold = f"import torch; x = torch.empty({700 * MIB}, dtype=torch.uint8, device='cuda'); "
        command = [sys.executable, "-c", hold + "print(1, flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        try:
            block(400)
        finally:
            child.communicate(b"\\n")
        """,
        also=("This training started the process",),
    ),
    Way(
        "fragmentation of expandable segments",
        """
        model, optimizer = begin(layers=True)
        mixed = [block(2 if at % 2 else 18) for at in range(80)]
        kept = mixed[1::2]
        del mixed
        block(300)
        """,
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        also=("returns only whole pages",),
        never=(_EXPANDABLE, "smaller batch"),
    ),
    Way(
        "memory of another stream",
        """
        begin()
        stream = torch.cuda.Stream()
        kept = []
        with torch.cuda.stream(stream):
            for _ in range(3):
                large = block(250)
                del large
                kept.append(block(130))
        block(300)
        """,
        also=("can only be used again on this stream",),
        never=("smaller batch",),
    ),
    Way(
        "batches that the program holds",
        """
        class Prefetcher:
            def __init__(self):
                self.batches = []
            def next(self, ahead):
                while len(self.batches) < ahead:
                    batch = torch.empty(8192, 512, pin_memory=True)
                    self.batches.append(batch.to("cuda", non_blocking=True))
                return self.batches.pop(0)
        model, optimizer = begin()
        prefetcher = Prefetcher()
        for ahead in (2, 2, 2, 60):
            model(prefetcher.next(ahead)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        also=("Hold fewer of these tensors",),
        never=("does not fit", _EXPANDABLE),
    ),
    Way(
        "batches that a generator holds",
        """
        def batches(ahead):
            held = [torch.empty(8192, 512, device="cuda") for _ in range(ahead)]
            while held:
                yield held.pop(0)
        model, optimizer = begin()
        for ahead in (4, 60):
            for x in batches(ahead):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        never=("does not fit", _EXPANDABLE),
    ),
    Way(
        "many forward passes before one backward pass",
        """
        model, optimizer = begin()
        total = 0
        for _ in range(64):
            total = total + model(torch.randn(4096, 512, device="cuda")).square().mean()
        total.backward()
        """,
        also=("`(loss / n).backward()`",),
        never=("does not fit",),
    ),
    Way(
        "a memory fraction, and another process",
        """
        torch.cuda.set_per_process_memory_fraction(0.25)
        begin()
        block(600)
        """,
        environment={"FAKE_CUDA_MEMORY": "2GiB"},
        also=("both of these remedies", "nvidia-smi"),
        other_process=1700,
    ),
    Way(
        "generation with a cache in a function",
        """
        model, optimizer = begin()
        layer = nn.Linear(512, 512).cuda()
        @torch.inference_mode()
        def decode(x, cache):
            for _ in range(20_000):
                x = layer(x)
                cache = torch.cat([cache, x], 1)
        decode(torch.randn(64, 1, 512, device="cuda"), torch.zeros(64, 0, 512, device="cuda"))
        """,
        also=("max_new_tokens",),
        never=(_EXPANDABLE,),
    ),
    Way(
        "outputs of an evaluation",
        """
        model, optimizer = begin()
        def validate(model):
            model.eval()
            outputs = []
            with torch.no_grad():
                for _ in range(500):
                    outputs.append(model(torch.randn(8192, 512, device="cuda")))
        validate(model)
        """,
        also=("`.cpu()`",),
        never=(_EXPANDABLE,),
    ),
    Way(
        "an average of the weights, at the optimizer's step",
        """
        model = mlp(2048, 11)
        optimizer = torch.optim.AdamW(model.parameters())
        memlog.init("local", model=model, finish_timeout=60)
        for _ in range(3):
            step(model, optimizer, 64, 2048)
        average = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer, 64, 2048)
        """,
        also=("A smaller batch does not help", "`fused=True`"),
    ),
    Way(
        "a replay buffer",
        """
        from collections import deque
        class Agent:
            def __init__(self):
                self.buffer = deque(maxlen=1000)
        model, optimizer = begin()
        agent = Agent()
        def collect(agent):
            for _ in range(1000):
                agent.buffer.append({"state": block(4), "next": block(4)})
        collect(agent)
        """,
        never=("smaller batch. ", _EXPANDABLE),
    ),
    Way(
        "a rollout in a model in training mode",
        """
        model, optimizer = begin()
        @torch.no_grad()
        def generate(model, prompt, tokens):
            past_key_values = []
            for _ in range(tokens):
                past_key_values.append((block(8), block(8)))
                model(prompt)
        generate(model, torch.randn(4096, 512, device="cuda"), 500)
        """,
        also=("max_new_tokens",),
    ),
    Way(
        "an exit after a caught failure",
        """
        import sys
        model, optimizer = begin()
        try:
            step(model, optimizer, 131_072)
        except torch.OutOfMemoryError:
            print("no memory")
            sys.exit(1)
        """,
        also=("It led to the error that ended the program: `SystemExit: 1`",),
    ),
    Way(
        "an unrolled recurrent network",
        """
        cell = nn.GRUCell(512, 512).cuda()
        begin()
        hidden = torch.zeros(2048, 512, device="cuda")
        for _ in range(1000):
            hidden = cell(torch.randn(2048, 512, device="cuda"), hidden)
        """,
        also=("`hidden.detach()`",),
        never=("does not fit",),
    ),
    Way(
        "a second model",
        """
        begin()
        def load():
            return mlp(4096, 20)
        teacher = load()
        """,
        never=(_EXPANDABLE,),
    ),
)
