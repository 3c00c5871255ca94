"""``watch_loss``, blocks and decorated functions: any result, any error, any thread."""

import asyncio
import copy
import gc
import inspect
import math
import pickle
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import memlog
from memlog.monitors import _publishing
from memlog.monitors._publishing import LossValue, Pending, known, read

pytestmark = pytest.mark.usefixtures("nothing_goes_wrong_inside")


class Output:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


class Named(typing.NamedTuple):
    logits: float
    loss: float


LOSSES: list[tuple[Any, float | None]] = [
    (0.5, 0.5),
    (3, 3.0),
    (1 + 2j, 1.0),
    ((0.5, "aux"), 0.5),
    ([torch.tensor(0.5), None], 0.5),
    (((0.5, 1), 2), 0.5),
    ({"loss": 0.5, "other": 7.0}, 0.5),
    ({"value": 0.5}, 0.5),
    ({"fun": 0.5, "jac": [1.0]}, 0.5),
    (types.MappingProxyType({"loss": 0.5}), 0.5),
    ({"other": 1.0}, None),
    (Output(torch.tensor(0.5)), 0.5),
    (types.SimpleNamespace(loss=0.5), 0.5),
    (Named(7.0, 0.5), 0.5),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor([1.0, 2.0]), 1.5),
    (torch.tensor([1, 2]), 1.5),
    (torch.tensor(2 + 1j), 2.0),
    (torch.empty(0), None),
    (torch.empty(1, device="meta"), None),
    (np.float32(0.5), 0.5),
    (np.array([1.0, 2.0]), 1.5),
    (np.array([]), None),
    ((np.array(0.5), np.zeros(3)), 0.5),
    (None, None),
    ((), None),
    ("text", None),
    (object(), None),
]


@pytest.mark.parametrize(("returned", "expected"), LOSSES)
@pytest.mark.seed(14)
def test_every_kind_of_loss_is_understood_and_handed_back(returned: Any, expected: Any) -> None:
    reading = read(returned)
    assert reading is None if expected is None else reading == known(expected)
    assert memlog.watch_loss(lambda: returned)() is returned


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_printed_and_has_no_value(number: float) -> None:
    assert read(torch.tensor(number)) == LossValue(None, str(number))
    assert read(number) == LossValue(None, str(number))


def test_fake_and_transformed_tensors_have_no_number() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert read(torch.ones(())) is None
    gradient = torch.func.grad(memlog.watch_loss(lambda x: (x * x).sum()))(torch.ones(2))
    assert gradient.tolist() == [2.0, 2.0]


def test_a_compiled_loss_has_one_graph() -> None:
    watched = memlog.watch_loss(lambda x: (x * 2).sum())
    compiled = torch.compile(watched, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).item() == 6.0


class Marker:
    """Object that lives as long as the graph that holds it."""


def test_no_graph_is_kept_alive() -> None:
    graphs: list[weakref.ref[Marker]] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.marker = Marker()
            graphs.append(weakref.ref(ctx.marker))
            return x.sum()

    watched = memlog.watch_loss(lambda: Marked.apply(torch.ones(2, requires_grad=True)))
    monitor = memlog.EpochMemoryMonitor()
    kept = watched()
    assert kept.requires_grad
    assert graphs[0]() is not None
    monitor.on_batch_end(0, kept)
    del kept
    gc.collect()
    assert graphs[0]() is None


def test_evaluations_are_counted_from_0(capsys: pytest.CaptureFixture[str]) -> None:
    watched = memlog.watch_loss(verbose_evaluations=2)(lambda x: x)
    for value in (0.14532, 0.098754, 0.5):
        watched(value)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" CPU")[0] for line in lines] == [
        "  Loss evaluation 0:",
        "    Iteration 1: loss=0.145320",
        "  Loss evaluation 1:",
        "    Iteration 2: loss=0.098754",
    ]


def test_an_error_is_shown_and_raised_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    error = MemoryError("no more")

    def fail() -> None:
        raise error

    for watched in (memlog.watch_loss(fail), memlog.monitor_memory(fail)):
        with pytest.raises(MemoryError) as raised:
            watched()
        assert raised.value is error
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "    Iteration 1: raised MemoryError"
    assert lines[2].startswith("[Memory] fail: CPU ")


def test_a_loss_that_cannot_be_read_is_an_evaluation_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd:
        @property
        def loss(self) -> float:
            raise RuntimeError("no")

    odd = Odd()
    assert memlog.watch_loss(lambda: odd)() is odd
    assert "Loss evaluation 0" in capsys.readouterr().out
    assert _publishing.HEALTH.faults.pop("reading a loss: RuntimeError") == 1


def test_methods_are_bound() -> None:
    class Objective:
        @memlog.watch_loss
        def loss(self, x: float) -> tuple["Objective", float]:
            return self, x

        also = memlog.watch_loss(lambda self, x: (self, x))

    objective = Objective()
    assert objective.loss(1.0) == objective.also(1.0) == (objective, 1.0)
    assert list(inspect.signature(objective.loss).parameters) == ["x"]


@memlog.watch_loss
def decorated(x: float) -> float:
    return x + 1


def plain(x: float) -> float:
    return x + 1


def test_a_watched_loss_can_be_pickled_like_its_function() -> None:
    assert copy.deepcopy(decorated) is decorated
    assert pickle.loads(pickle.dumps(decorated)) is decorated  # noqa: S301 - made here
    assert pickle.loads(pickle.dumps(memlog.watch_loss(plain))) is plain  # noqa: S301 - made here
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(memlog.watch_loss(lambda x: x))


@pytest.mark.seed(152)
def test_metadata_is_kept() -> None:
    def loss(x: int, *, y: int = 2) -> int:
        """Its words."""
        return x + y

    loss.mark = "kept"  # type: ignore[attr-defined]
    decorators: list[Callable[..., Any]] = [memlog.watch_loss, memlog.monitor_memory]
    for watched in [decorate(loss) for decorate in decorators]:
        assert (watched.__name__, watched.__doc__, watched.mark) == ("loss", "Its words.", "kept")
        assert inspect.signature(watched) == inspect.signature(loss)
    model = torch.nn.Linear(1, 1)
    assert "_parameters" not in vars(memlog.watch_loss(model))


def test_threads_share_one_counter(capsys: pytest.CaptureFixture[str]) -> None:
    watched = memlog.watch_loss(verbose_evaluations=10_000)(lambda: 1.0)

    def work() -> None:
        for _ in range(200):
            watched()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in capsys.readouterr().out.splitlines() if "Loss evaluation" in line]
    numbers = [int(line.split("Loss evaluation ")[1].split(":")[0]) for line in lines]
    assert sorted(numbers) == list(range(800))


class SlowDevice:
    """Says when a copy has arrived: the host's part of a device's event."""

    def __init__(self) -> None:
        self.arrived = threading.Event()

    def synchronize(self) -> None:
        assert self.arrived.wait(20)


@pytest.mark.seed(14)
def test_a_loss_on_its_way_is_not_waited_for_and_order_is_kept() -> None:
    late, device, got = _publishing.DeferredLosses(), SlowDevice(), []
    threads = []

    def then(value: LossValue | None) -> None:
        threads.append(threading.current_thread())
        got.append(value)

    late.deliver(Pending(torch.tensor(0.25), device), then)
    late.deliver(known(0.5), then)
    assert got == []
    device.arrived.set()
    late.settle(20)
    late.deliver(None, then)
    assert got == [known(0.25), known(0.5), None]
    assert threads[2] is threading.current_thread() is not threads[0]


@pytest.mark.seed(28, 29)
def test_nested_blocks_and_what_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    with memlog.track_memory("outer"):
        with memlog.track_memory():
            kept = torch.ones(
                256 * 2**18
            )  # 256 MiB; the kernel may take back some file pages meanwhile
        with memlog.track_memory("silent", print_output=False):
            del kept
    inner, outer = capsys.readouterr().out.splitlines()
    assert inner.startswith("[Memory] operation: CPU +")
    assert 128 <= float(inner.split("+")[1].split()[0]) <= 260
    assert outer.startswith("[Memory] outer: CPU ")


@pytest.mark.seed(151)
def test_a_block_that_raises_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), memlog.track_memory("x"):
        raise KeyboardInterrupt
    assert capsys.readouterr().out.startswith("[Memory] x: CPU ")


@pytest.mark.seed(25, 26, 27, 44, 152)
def test_decorators_with_and_without_brackets_and_async(capsys: pytest.CaptureFixture[str]) -> None:
    @memlog.monitor_memory
    def bare() -> int:
        return 1

    @memlog.monitor_memory()
    def empty() -> int:
        return 2

    @memlog.monitor_memory("training epoch")
    async def labelled() -> int:
        await asyncio.sleep(0)
        return 3

    @memlog.monitor_memory(verbose=False)
    def silent() -> int:
        return 4

    assert inspect.iscoroutinefunction(labelled)
    assert [bare(), empty(), asyncio.run(labelled()), silent()] == [1, 2, 3, 4]
    labels = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["[Memory] bare", "[Memory] empty", "[Memory] training epoch"]
