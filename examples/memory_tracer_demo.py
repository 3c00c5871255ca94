"""Five demonstrations of the tracer, on a GPU if there is one, otherwise on the CPU.

python examples/memory_tracer_demo.py           # all of them
python examples/memory_tracer_demo.py flame     # one: basic, fragmentation, transformer, flame, overhead
"""

# PyTorch leaves Tensor.backward without types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import memlog

MIB = 1024**2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(DEVICE)


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 64, 64, device=DEVICE)


def basic() -> None:
    """Memory of a training step, layer by layer."""
    model = convolutional()
    optimizer = torch.optim.Adam(model.parameters())
    tracer = memlog.MemoryTracer()

    with tracer.trace(model):
        loss = model(images(16)).square().mean()
        loss.backward()
        optimizer.step()

    tracer.print_summary()
    peaks = sorted(tracer.get_peak_memory_per_layer().items(), key=lambda item: -item[1])
    print("\nTop 3 by the peak while they are active:")
    for name, peak in peaks[:3]:
        print(f"  {name}: {peak / MIB:.2f} MB")


def fragmentation() -> None:
    """Fragmentation of the allocator's memory after batches of many sizes."""
    model = convolutional()
    tracer = memlog.MemoryTracer(enable_fragmentation_tracking=True)
    with tracer.trace(model):
        for count in (4, 8, 16, 8, 4):
            model(images(count))

    whole = tracer.result.fragmentation
    if whole is None:
        print(f"Fragmentation is unknown on {DEVICE}: {tracer.result.fragmentation_reason}.")
        return
    print(f"After the last batch: {whole.ratio:.1%} of {whole.reserved / MIB:.1f} MB reserved")
    for layer, ratio in tracer.get_fragmentation_stats().items():
        print(f"  {layer}: " + ("unknown" if ratio is None else f"{ratio:.1%}"))


def transformer() -> None:
    """Memory of a transformer at the peak, by purpose."""
    layer = nn.TransformerEncoderLayer(128, 8, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(DEVICE)
    tracer = memlog.MemoryTracer()
    with tracer.trace(model):
        model(torch.randn(8, 64, 128, device=DEVICE)).mean().backward()

    print(f"Peak {(tracer.result.peak or 0) / MIB:.1f} MB, of which")
    for category, size in tracer.result.categories.items():
        print(f"  {category}: {size / MIB:.2f} MB")
    print("Kept for the backward pass:")
    for number in range(4):
        forward = tracer.get_layer_figures(f"layers.{number}").phase("forward")
        kept = forward.kept if forward else None
        print(f"  layers.{number}: " + ("unknown" if kept is None else f"{kept / MIB:.2f} MB"))


def flame() -> None:
    """Files for speedscope, Perfetto, PyTorch's memory page and other programs."""
    model = convolutional()
    tracer = memlog.MemoryTracer()
    with tracer.trace(model):
        model(images(16)).sum().backward()

    print(
        f"{tracer.export_flame_graph('memory_profile.speedscope.json')}: open it with memlog open"
    )
    print(f"{tracer.export_trace('memory_trace.json.gz')}: https://ui.perfetto.dev")
    print(f"{tracer.export_snapshot('memory_snapshot.pickle')}: https://pytorch.org/memory_viz")
    print(f"{tracer.export_timeline('memory_timeline.json')}: events, layer_stats, summary")


def overhead() -> None:
    """Cost of tracing every step; a session traces only some steps, within a budget."""
    model, batch = convolutional(), images(16)

    def step() -> float:
        begun = time.perf_counter()
        model(batch).square().mean().backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    tracer = memlog.MemoryTracer()
    step()
    bare, traced = [], []
    for _ in range(10):  # alternating, so that a change of the machine's speed affects both
        bare.append(step())
        with tracer.trace(model):
            traced.append(step())
    untraced, with_tracer = statistics.median(bare), statistics.median(traced)
    print(f"A step takes {untraced * 1e3:.2f} ms, a traced one {with_tracer * 1e3:.2f} ms")
    print(f"Overhead: {(with_tracer / untraced - 1):.1%}")


DEMOS: dict[str, Callable[[], None]] = {
    "basic": basic,
    "fragmentation": fragmentation,
    "transformer": transformer,
    "flame": flame,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Show which layers hold the memory.")
    parser.add_argument("demos", nargs="*", metavar="DEMO", help=f"of {', '.join(DEMOS)} (all)")
    chosen = parser.parse_args().demos or list(DEMOS)
    for name in chosen:
        if name not in DEMOS:
            parser.error(f"there is no demo {name!r}; choose from {', '.join(DEMOS)}")
    torch.manual_seed(0)
    for name in chosen:
        print(f"== {name} on {DEVICE}: {DEMOS[name].__doc__}\n")
        DEMOS[name]()
        print()


if __name__ == "__main__":
    main()
