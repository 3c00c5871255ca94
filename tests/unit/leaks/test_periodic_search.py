"""Containers that grow whenever memory rises: the walk, the paths of names, the weight, and what is named."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from memlog._internal.terminal import format_bytes
from memlog.leaks import growers, periodic_search, program_walk
from memlog.leaks.containers import ElementWeight
from memlog.leaks.holders import Holder
from memlog.leaks.owner_chain import NamePath, Start, follow
from memlog.leaks.periodic_search import PeriodicSearch
from memlog.leaks.periodic_text import holder_of_growth
from memlog.leaks.program_walk import ProgramWalk
from memlog.tracer.module_stack import CallingLines

MIB = 2**20
EVERY = 30


pytestmark = pytest.mark.usefixtures("only_this_file")


def tensor() -> torch.Tensor:
    return torch.empty(MIB // 4)


class Memory:
    """Level of the process's memory, as the program and the tests set it."""

    def __init__(self) -> None:
        self.level = 500 * MIB

    def take(self, count: int = 10) -> list[torch.Tensor]:
        self.level += count * MIB
        return [tensor() for _ in range(count)]


def named(
    evaluate: Callable[[int], object], memory: Memory, steps: int = 200, every: int = EVERY
) -> list[tuple[int, list[Holder]]]:
    """Train, evaluate every 30 steps, and return what is named after each rise."""
    search = PeriodicSearch(2 * MIB)
    found = []
    for step in range(steps):
        if step % every == every - 1:
            evaluate(step)
        growers = search.step_ended(step, memory.level)
        if growers is not None:
            found.append((step, [holder_of_growth(one) for one in growers]))
            del growers
    return found


def only(found: list[tuple[int, list[Holder]]]) -> Holder:
    """Return the holder that is named last, if it is the only one, at each rise from the first on."""
    assert [len(holders) for _, holders in found][1:] == [1] * (len(found) - 1)
    [holder] = found[-1][1]
    return holder


@dataclass
class State:
    kept: list[Any] = field(default_factory=list)


@dataclass
class Window:
    shown: list[Any]
    """No statement of this file adds to an attribute of this name."""


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Log:
    kept: list[Any] = []  # noqa: RUF012 - as programs have it


class Trainer:
    def __init__(self) -> None:
        self.metric = State()


GLOBAL: list[Any] = []


def test_a_list_is_named_at_the_first_rise_and_again_at_each() -> None:
    memory, history = Memory(), []
    found = named(lambda _: history.extend(memory.take()), memory)
    assert found[0][0] < 2 * EVERY
    holder = only(found)
    assert (holder.kind, holder.confidence) == ("kept_tensors", "high")
    assert "`history`, a list in `test_a_list_is_named" in holder.title
    assert "gains 10 tensors every 30 steps. That keeps 10.0 MiB each time." in holder.title
    assert holder.bytes_per_step == pytest.approx(10 * MIB / EVERY, rel=0.05)
    assert (holder.where or "").startswith("test_periodic_search.py:")
    assert "memory rose by 10.0 MiB at each of" in holder.evidence[0]


def test_what_is_kept_in_other_places_is_named() -> None:
    def of(evaluate: Callable[[int], object]) -> str:
        return only(named(evaluate, memory)).title.partition(",")[0].strip("`")

    memory, by_step, recent = Memory(), dict[int, Any](), collections.deque[Any]()
    assert of(lambda step: by_step.update({step: memory.take()})) == "by_step"
    assert of(lambda _: recent.append(memory.take())) == "recent"
    trainer, slots, module = Trainer(), Slots(), torch.nn.Linear(2, 2)
    assert of(lambda _: trainer.metric.kept.append(memory.take())) == "trainer.metric.kept"
    assert of(lambda _: slots.kept.append(memory.take())) == "slots.kept"
    assert of(lambda _: Log.kept.append(memory.take())) == "Log.kept"
    assert of(lambda _: GLOBAL.append(memory.take())) == "GLOBAL"
    module.kept = []  # type: ignore[assignment]
    assert of(lambda _: module.kept.append(memory.take())) == "module.kept"  # type: ignore[operator, union-attr]

    def collector() -> Iterator[None]:
        seen = []
        while True:
            yield
            seen.append(memory.take())

    running = collector()
    next(running)
    assert of(lambda _: next(running)) == "seen of running"

    def made() -> Callable[[int], object]:
        inside: list[Any] = []
        return lambda _: inside.append(memory.take())

    function = made()
    assert of(function) == "inside of <lambda>()"


def test_a_variable_of_another_thread_is_named() -> None:
    memory, waiting = Memory(), queue.Queue[Any]()

    def write() -> None:
        written = []
        while (one := waiting.get()) is not None:
            written.append(one)
            one = None
            waiting.task_done()

    def evaluate(_: int) -> None:
        waiting.put(memory.take())
        waiting.join()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        holder = only(named(evaluate, memory))
    finally:
        waiting.put(None)
        thread.join()
    assert "`written`, a list in `write()`" in holder.title


def test_a_local_variable_of_a_generator_that_only_a_loop_refers_to_is_named() -> None:
    memory = Memory()
    search = PeriodicSearch(2 * MIB)
    found: list[Holder] = []

    def batches() -> Iterator[int]:
        kept: list[torch.Tensor] = []
        for step in range(200):
            if step % EVERY == EVERY - 1:
                kept += memory.take()
            yield step

    for step in batches():  # the generator is nowhere but on the stack of values of this function
        growers = search.step_ended(step, memory.level)
        found = found if growers is None else [holder_of_growth(one) for one in growers]
        del growers
    [holder] = found
    assert "`kept`, a list in `batches()`" in holder.title


def test_lists_in_a_container_are_counted_together() -> None:
    memory, by_key = Memory(), {key: list[Any]() for key in "abcde"}
    holder = only(named(lambda _: [one.extend(memory.take(2)) for one in by_key.values()], memory))
    assert "5 containers" in holder.title
    assert "gain 10 tensors every 30 steps" in holder.title


def test_a_list_that_is_replaced_by_a_longer_one_is_named() -> None:
    memory, trainer = Memory(), Trainer()

    def evaluate(_: int) -> None:
        trainer.metric.kept = [*trainer.metric.kept, memory.take()]

    assert "trainer.metric.kept" in only(named(evaluate, memory)).title


def test_a_list_with_two_names_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two lists with the same elements, none is named. ``multiprocessing`` gives a module two names."""
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", [Memory().take(1)])
    reading = growers.RiseReading(0, 0, 0, 0)
    candidates = [
        growers.Candidate(NamePath(Start("GLOBAL", module), ()), [reading], False)
        for module in (__name__, "__mp_main__")
    ]
    assert [one.path.start.place for one, _ in growers._measured(candidates)] == [__name__]


def test_a_tensor_that_is_replaced_by_a_longer_one_is_named() -> None:
    memory, module = Memory(), torch.nn.Linear(2, 2)
    module.register_buffer("states", torch.zeros(MIB))

    def evaluate(_: int) -> None:
        memory.level += 10 * MIB
        module.states = torch.cat([module.states, torch.zeros(10 * MIB // 4)])

    holder = only(named(evaluate, memory))
    assert holder.kind == "kept_tensors"
    assert holder.title.startswith("`module.states` in `test_a_tensor_that_is_replaced")
    assert "is replaced by larger ones: 10.0 MiB each time" in holder.title
    assert holder.bytes_per_step == pytest.approx(10 * MIB / EVERY, rel=0.05)


def test_a_data_frame_that_is_replaced_by_a_longer_one_is_named() -> None:
    memory, table = Memory(), pd.DataFrame()

    def evaluate(_: int) -> None:
        nonlocal table
        memory.level += 10 * MIB
        values = np.zeros((10 * MIB // 400, 100), dtype="float32")
        table = pd.concat([table, pd.DataFrame(values).assign(step=1)])

    holder = only(named(evaluate, memory))
    assert holder.title.startswith("`table` in `test_a_data_frame_that_is_replaced")
    assert "is replaced by larger ones: 10." in holder.title


def test_an_arrow_table_that_is_replaced_by_a_longer_one_is_named() -> None:
    memory, table = Memory(), pa.table({"outputs": np.zeros(1, dtype="float32")})

    def evaluate(_: int) -> None:
        nonlocal table
        memory.level += 10 * MIB
        values = np.zeros(10 * MIB // 4, dtype="float32")
        table = pa.concat_tables([table, pa.table({"outputs": values})])

    holder = only(named(evaluate, memory))
    assert holder.title.startswith("`table` in `test_an_arrow_table_that_is_replaced")
    assert "is replaced by larger ones: 10.0 MiB each time" in holder.title


def test_levels_that_go_up_and_down_do_not_hide_a_container() -> None:
    """Gradients are freed and made again: the levels swing by more than the smallest rise."""
    memory, history, swings = Memory(), [], random.Random(5)  # noqa: S311 - the same at every run
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(800):
        if step % 80 == 79:
            history.append(memory.take())
        growers = search.step_ended(step, memory.level + swings.choice((0, 0, 4, 8)) * MIB)
        if growers:
            found.append(holder_of_growth(growers[0]))
        del growers
    assert len(found) >= 3
    assert all("`history`, a list in" in one.title for one in found)
    assert found[-1].bytes_per_step == pytest.approx(10 * MIB / 80, rel=0.2)


@pytest.mark.parametrize("kind", ["list", "deque", "tuples"])
def test_the_newest_element_can_be_the_first(kind: str) -> None:
    memory = Memory()
    newest_first: Any = collections.deque() if kind == "deque" else []

    def evaluate(step: int) -> None:
        [taken] = memory.take(1)
        memory.level += 9 * MIB
        taken = torch.cat([taken, torch.empty(9 * MIB // 4)])
        newest_first.insert(0, (step, taken) if kind == "tuples" else taken)

    holder = only(named(evaluate, memory))
    assert holder.title.startswith("`newest_first`, a ")
    assert "every 30 steps" in holder.title


def test_two_containers_that_grow_at_different_rises_are_both_named() -> None:
    memory, copies, records = Memory(), [], []

    def keep(step: int) -> None:
        if step % 50 == 49:
            copies.append(memory.take(8))
        if step % 20 == 19:
            records.append(memory.take(3))

    found = named(keep, memory, steps=400, every=1)
    titles = [one.title for one in found[-1][1]]
    assert len(titles) == 2
    assert titles[0].startswith("`copies`, a list in")
    assert titles[1].startswith("`records`, a list in")


def test_inputs_and_outputs_of_larger_steps_are_not_named() -> None:
    memory, trainer = Memory(), SimpleNamespace(metric=Window([]))
    inputs, output = [tensor()], torch.zeros(MIB // 4)

    def more_inputs(step: int) -> None:
        nonlocal inputs
        inputs = []
        inputs.extend(memory.take(10) + [tensor() for _ in range(step // 3)])

    def more_state(step: int) -> None:
        trainer.metric = Window([tensor() for _ in range(step // 3)] + memory.take(10))

    def larger_output(step: int) -> None:
        nonlocal output
        memory.level += 10 * MIB
        output = torch.zeros(step * MIB // 12)

    for larger_step in (more_inputs, more_state, larger_output):
        # What grew at one rise is told to nobody: a new list can have the identity of the one before.
        found = [one for _, holders in named(larger_step, memory) for one in holders]
        assert [one.title for one in found if one.confidence != "low"] == []
    assert inputs
    assert len(output)


def test_kept_graphs_are_told_from_kept_tensors() -> None:
    memory, losses = Memory(), []
    weight = torch.ones(MIB // 4, requires_grad=True)

    def evaluate(_: int) -> None:
        loss = weight
        for _ in range(10):
            loss = loss.exp()
        memory.level += 10 * MIB
        losses.append(loss.sum())

    holder = only(named(evaluate, memory))
    assert holder.kind == "kept_graph"
    assert ".detach()" in (holder.remedy or "")


def test_views_of_larger_tensors_are_told_from_all_rows_of_a_tensor() -> None:
    memory, rows, lanes = Memory(), list[torch.Tensor](), list[torch.Tensor]()

    def keep_all(_: int) -> None:
        memory.level += 10 * MIB
        rows.extend(torch.empty(1024, 10 * 256))

    holder = only(named(keep_all, memory))
    assert holder.bytes_per_step == pytest.approx(10 * MIB / EVERY, rel=0.1)
    assert ".clone()" not in (holder.remedy or "")

    def keep_some(_: int) -> None:
        memory.level += 10 * MIB
        lanes.extend(torch.empty(1024, 10 * 256)[:4])

    holder = only(named(keep_some, memory))
    assert "`lanes`, a list" in holder.title
    assert holder.bytes_per_step == pytest.approx(10 * MIB / EVERY, rel=0.1)
    assert ".clone()" in (holder.remedy or "")


class Foreign:
    """An object that refers to one of a C library."""

    def __init__(self) -> None:
        self.image = Image.new("L", (1, 1))


def test_objects_whose_memory_python_does_not_see_are_named_by_elimination() -> None:
    memory, decoded, names = Memory(), [], []

    def evaluate(step: int) -> None:
        memory.level += 10 * MIB
        decoded.append(Foreign())
        names.append(str(step))

    holder = only(named(evaluate, memory))
    assert holder.title.startswith("`decoded`, a list")
    assert "emory is outside Python" in holder.title
    assert holder.confidence == "medium"


def test_elements_with_too_many_objects_to_weigh_are_named_by_elimination() -> None:
    memory, records, names = Memory(), [], []

    def evaluate(step: int) -> None:
        memory.level += 10 * MIB
        records.append([[] for _ in range(30_000)])
        names.append(str(step))

    holder = only(named(evaluate, memory))
    assert holder.title.startswith("`records`, a list")
    assert "too many objects to add up" in holder.title
    assert holder.confidence == "medium"


def test_many_objects_of_an_older_element_leave_the_newest_one_its_weight() -> None:
    older = [[] for _ in range(30_000)]
    weight = ElementWeight()
    weight.add([older])
    assert weight.is_partial
    weight.forget_counts()
    weight.add([torch.ones(1000)])
    assert weight.own == pytest.approx(4000, abs=1)
    assert not weight.is_partial


def test_two_containers_with_foreign_objects_are_not_named() -> None:
    memory, decoded, others = Memory(), [], []

    def evaluate(_: int) -> None:
        memory.level += 10 * MIB
        decoded.append(Foreign())
        others.append(Foreign())

    assert not any(holders for _, holders in named(evaluate, memory))


def test_two_containers_with_the_same_tensors_are_not_named() -> None:
    memory, history, again = Memory(), [], []

    def evaluate(_: int) -> None:
        taken = memory.take()
        history.extend(taken)
        again.extend(taken)

    assert not any(holders for _, holders in named(evaluate, memory))


def test_modules_are_weighed_with_their_gradients() -> None:
    memory, layers = Memory(), torch.nn.ModuleList()

    def grow(_: int) -> None:
        layer = torch.nn.Linear(1024, 1024, bias=False)
        layer.weight.grad = torch.zeros(1024, 1024)
        layers.append(layer)
        memory.level += 16 * MIB  # with the optimizer's state

    [holder] = named(grow, memory)[-1][1]
    assert holder.kind == "model_copies"
    assert holder.bytes_per_step == pytest.approx(8 * MIB / EVERY, rel=0.05)


def test_hooks_that_pile_up_are_named_and_not_the_list_of_one_of_them() -> None:
    memory, layer = Memory(), torch.nn.ReLU()

    def evaluate(_: int) -> None:
        features: list[torch.Tensor] = []
        layer.register_forward_hook(lambda _module, _inputs, out: features.append(out.detach()))
        for batch in memory.take():
            layer(batch)

    [holder] = named(evaluate, memory)[-1][1]
    assert holder.kind == "hooks_pile_up"
    assert holder.title.startswith("`layer._forward_hooks`, an OrderedDict in `test_hooks_that")
    assert "gains one hook every 30 steps. That keeps 10.0 MiB each time." in holder.title
    assert "`remove()`" in (holder.remedy or "")


@pytest.mark.parametrize("most", [0, 10_000])
def test_a_queue_is_named_by_the_programs_name_also_if_elements_leave_it(most: int) -> None:
    memory, jobs = Memory(), queue.Queue(most)

    def log(_: int) -> None:
        for one in memory.take(12):
            jobs.put(("grad", one))
        jobs.get()
        jobs.get()
        memory.level -= 2 * MIB

    [holder] = named(log, memory, steps=400)[-1][1]
    assert holder.title.startswith("`jobs`, a Queue in `test_a_queue_is_named")
    assert "gains 10 tensors every 30 steps. That keeps 10.0 MiB each time" in holder.title
    assert "maxsize" in (holder.remedy or "")
    assert (holder.bytes_left is not None) is bool(most)


def test_a_cycle_over_a_loader_is_named_as_such() -> None:
    memory = Memory()

    def loader() -> Iterator[torch.Tensor]:
        while True:
            yield from memory.take(1)

    batches = itertools.cycle(loader())
    holder = only(named(lambda _: next(batches), memory, every=3))
    assert holder.title.startswith("`batches`, a cycle in `test_a_cycle_over")
    assert "`while True: yield from loader`" in (holder.remedy or "")


def test_layers_that_are_unfrozen_one_after_the_other_are_what_grows_and_have_a_limit() -> None:
    memory, layers = Memory(), [torch.nn.Linear(1024, 1024, bias=False) for _ in range(7)]
    optimizer = torch.optim.Adam(layers[0].parameters())
    trained = iter(layers[1:])

    def step() -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.zeros_like(one)
        optimizer.step()

    step()

    def unfreeze(_: int) -> None:
        optimizer.add_param_group({"params": list(next(trained).parameters())})
        step()
        memory.level += 12 * MIB

    holder = only(named(unfreeze, memory))
    assert holder.title.startswith("`optimizer.state`, a defaultdict in `test_layers_that_are")
    assert "gains one element every 30 steps. That keeps 12.0 MiB each time." in holder.title
    assert holder.bytes_left is not None
    assert (
        holder.evidence[-1] == "an optimizer's state grows as the program trains more of its layers"
    )


def test_what_the_traceback_of_a_kept_exception_holds_is_weighed() -> None:
    memory, errors = Memory(), []

    def load() -> None:
        batch = memory.take()
        raise ValueError(len(batch))

    def evaluate(_: int) -> None:
        try:
            load()
        except ValueError as error:
            errors.append(error)

    holder = only(named(evaluate, memory))
    assert "`errors`" in holder.title
    assert "keeps 10.0 MiB each time" in holder.title
    assert "`str(error)`" in (holder.remedy or "")


def test_a_period_that_the_gain_in_all_belies_is_not_told() -> None:
    memory, search = Memory(), PeriodicSearch(2 * MIB)
    kept, found = [], []
    for step in range(100):
        if step % EVERY == EVERY - 1:
            kept += memory.take()
        found += search.step_ended(step, memory.level) or []
    grower = found[-1]._replace(gained=6, each=1, every=15, steps=68, rises=4, is_steady=False)
    assert "gains 6 tensors in 68 steps. That keeps" in holder_of_growth(grower).title
    sure = grower._replace(every=11)
    assert "gains one tensor every 11 steps" in holder_of_growth(sure).title
    once = sure._replace(gained=1, rises=1, steps=11)
    assert [text.partition(", which")[0] for text in holder_of_growth(once).evidence] == [
        f"memory rose by {format_bytes(once.growth)} at one rise",
        "one more element after 11 steps",
    ]


def test_images_in_axes_are_named_although_each_leads_to_the_others() -> None:
    """Each image refers to its axes, which have a set of the images beside the list."""
    memory = Memory()
    figure = Figure()
    axes = figure.subplots()

    def plot(_: int) -> None:
        axes.imshow(np.zeros((1024, 1024)))
        memory.level += 8 * MIB

    holder = only(named(plot, memory))
    assert "gains one element every 30 steps" in holder.title
    assert holder.bytes_per_step == pytest.approx(8 * MIB / EVERY, rel=0.05)


def test_an_older_element_that_leads_to_the_newer_ones_leaves_them_their_weight() -> None:
    memory = Memory()
    kept: list[dict[str, Any]] = []

    def evaluate(_: int) -> None:
        kept.append({"outputs": memory.take()})
        if len(kept) > 1:
            kept[-2]["next"] = kept[-1]

    holder = only(named(evaluate, memory))
    assert "`kept`" in holder.title
    assert holder.bytes_per_step == pytest.approx(10 * MIB / EVERY, rel=0.05)


def test_figures_that_are_never_closed_are_named() -> None:
    memory = Memory()
    plt.close("all")

    def plot(_: int) -> None:
        plt.figure()
        memory.level += 4 * MIB

    try:
        holder = only(named(plot, memory))
    finally:
        plt.close("all")
    assert "`Gcf.figs`" in holder.title
    assert holder.remedy == "Close each figure that is no longer needed: `plt.close(figure)`."
    assert holder.bytes_per_step == pytest.approx(4 * MIB / EVERY, rel=0.05)


def test_a_buffer_whose_elements_leave_in_random_order_is_named_while_it_fills() -> None:
    memory, order = Memory(), random.Random(0)  # noqa: S311 - no secret
    buffer: list[Any] = []

    def fill(_: int) -> None:
        for number, one in enumerate(memory.take(12)):
            buffer.append(one)
            if number % 3 == 0:
                place = order.randrange(len(buffer))
                buffer[place], buffer[-1] = buffer[-1], buffer[place]
                buffer.pop()
                memory.level -= MIB

    found = named(fill, memory, steps=400)
    assert len(found) > 5
    assert all("`buffer`" in holders[0].title for _, holders in found[1:])


def test_bounded_containers_are_named_no_more_when_they_are_full() -> None:
    memory, ring, cache = Memory(), collections.deque[Any](maxlen=3), dict[int, Any]()
    other: list[Any] = []

    def evaluate(step: int) -> None:
        ring.append(memory.take())
        memory.level += 5 * MIB
        if len(cache) < 2:
            cache[step] = memory.take(1)
        other.append(float(step))

    found = named(evaluate, memory, steps=400)
    assert len(found) > 5
    assert not any(holders for _, holders in found[4:])
    last: list[Any] = []

    def keep_three(_: int) -> None:
        last.append(memory.take())
        del last[:-3]

    found = named(keep_three, memory, steps=400)
    assert not any(holders for _, holders in found[5:])  # a rise later than the last that it gained


class Cached(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __len__(self) -> int:
        return 60


@pytest.mark.parametrize(("key", "has_limit"), [(int, True), (str, False)])
def test_a_data_set_that_keeps_its_samples_keeps_each_one_time(
    key: Callable[[int], Any], *, has_limit: bool
) -> None:
    memory, data = Memory(), Cached()

    def evaluate(step: int) -> None:
        data.kept[key(step)] = memory.take()

    holder = only(named(evaluate, memory, steps=300))
    assert "`data.kept`, a dict" in holder.title
    assert ("at most 60 elements (600.0 MiB)" in holder.title) == has_limit
    assert (holder.bytes_left is not None) == has_limit


@pytest.mark.parametrize("kind", ["list", "dict", "deque"])
def test_what_a_container_with_a_limit_can_still_gain_is_told(kind: str) -> None:
    memory, slots = Memory(), 60
    listed: list[Any] = [None] * slots
    keyed: dict[int, Any] = dict.fromkeys(range(slots))
    ring = collections.deque[Any](maxlen=slots)

    def large() -> torch.Tensor:
        memory.level += 10 * MIB
        return torch.empty(10 * MIB // 4)

    def evaluate(step: int) -> None:
        number = step // EVERY
        # Not from the beginning on: the first slot is filled last.
        if kind == "list":
            listed[number + 1] = large()
        elif kind == "dict":
            keyed[slots - 1 - number] = large()
        else:
            ring.append(large())

    holder = only(named(evaluate, memory, steps=300))
    assert holder.kind == "kept_tensors"
    assert {"list": "listed", "dict": "keyed", "deque": "ring"}[kind] in holder.title
    assert "gains one tensor every 30 steps" in holder.title
    assert "and at most 60 elements (600.0 MiB)" in holder.title
    assert 500 * MIB <= (holder.bytes_left or 0) <= 530 * MIB


def test_a_list_of_each_layer_is_counted_together() -> None:
    memory = Memory()
    layers = [State() for _ in range(10)]
    slotted = [Slots() for _ in range(10)]

    def evaluate(_: int) -> None:
        for each in (*layers, *slotted):
            each.kept += memory.take(1)

    found = named(evaluate, memory)[-1][1]
    assert [one.bytes_per_step for one in found] == [pytest.approx(10 * MIB / EVERY, rel=0.1)] * 2
    assert found[0].title.startswith("`layers[…].kept` and the like, 10 containers in ")
    assert "gain 10 tensors every 30 steps" in found[0].title


@functools.cache
def cached(number: int) -> list[torch.Tensor]:
    return [torch.empty(10 * MIB // 4 + number)]


def test_a_cache_of_functools_gets_its_own_remedy_and_line() -> None:
    memory = Memory()

    def evaluate(step: int) -> None:
        cached(step)
        memory.level += 10 * MIB

    evaluate(0)
    holder = only(named(evaluate, memory))
    cached.cache_clear()
    assert holder.title.startswith("`cache of cached()`, ")
    assert "lru_cache(maxsize=…)" in (holder.remedy or "")
    assert (holder.where or "").startswith("test_periodic_search.py:")


class Meter:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def add(self, value: Any) -> None:
        self.values.append(value)


class OtherMeter:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def log(self, value: Any) -> None:
        self.values.append(value)


def test_the_line_is_that_of_the_owners_class() -> None:
    memory, meter = Memory(), OtherMeter()
    holder = only(named(lambda _: meter.log(memory.take()), memory))
    line = OtherMeter.log.__code__.co_firstlineno + 1
    assert holder.where == f"test_periodic_search.py:{line}"
    place = (
        "`meter.values`, a list in `test_the_line_is_that_of_the_owners_class()`, gains one element"
    )
    assert holder.title.startswith(place)
    assert f"every 30 steps in `log()` (test_periodic_search.py:{line})." in holder.title


def test_a_list_of_tensors_is_told_from_a_list_of_losses_beside_it() -> None:
    memory = Memory()
    history: dict[str, list[Any]] = {"losses": [], "outputs": []}

    def evaluate(step: int) -> None:
        history["losses"] += [float(step), step + 0.5, step + 0.1]
        history["outputs"] += memory.take()

    holder = only(named(evaluate, memory, steps=400))
    assert "`history['outputs']`, a list" in holder.title
    assert "gains 10 tensors every 30 steps" in holder.title


def test_memory_that_rises_for_other_reasons_too_does_not_change_what_is_told() -> None:
    kept: list[Any] = []
    memory, search = Memory(), PeriodicSearch(2 * MIB)
    found: list[Holder] = []
    for step in range(200):
        if step % EVERY == EVERY - 1:
            kept.append(memory.take())
        # The allocator takes 3 MiB more, and gives them back, between the rises.
        extra = 3 * MIB if step % EVERY in range(10, 15) else 0
        growers = search.step_ended(step, memory.level + extra)
        found = [holder_of_growth(one) for one in growers] if growers else found
        del growers
    [holder] = found
    assert "gains one element every 30 steps" in holder.title
    assert "That keeps 10.0 MiB each time" in holder.title


def test_what_is_kept_at_each_step_is_told_per_step_although_memory_rises_in_stairs() -> None:
    kept: list[Any] = []
    search, level, found = PeriodicSearch(2 * MIB), 500 * MIB, []
    # The allocator takes 8 MiB at a time, at irregular steps.
    for step in range(120):
        if step >= 10:
            kept.append(tensor())
        if step in (14, 23, 30, 41, 47, 54, 65, 70, 79, 87, 94, 103, 112):
            level += 8 * MIB
        growers = search.step_ended(step, level)
        found = [holder_of_growth(one) for one in growers] if growers else found
        del growers
    [holder] = found
    assert "gains one tensor per step" in holder.title
    assert "That keeps 1.0 MiB per step" in holder.title


def test_a_container_that_holds_a_little_of_the_growth_is_returned_as_such() -> None:
    memory, kept = Memory(), []
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(60):
        kept.append(torch.empty(MIB // 40))  # 0.1 MiB of 2 MiB
        memory.level += 2 * MIB
        growers = search.step_ended(step, memory.level)
        found = [(one.is_little, holder_of_growth(one).title) for one in growers or []] or found
        del growers
    assert kept
    [(is_little, title)] = found
    assert is_little
    assert "`kept`, a list" in title
    assert "gains one tensor per step" in title


def test_two_containers_that_together_hold_enough_are_its_cause() -> None:
    memory, some, others = Memory(), [], []
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(60):
        some.append(tensor())
        others.append(tensor())
        memory.level += 3 * MIB
        growers = search.step_ended(step, memory.level)
        found = [(one.is_little, one.gained) for one in growers or []] or found
        del growers
    assert len(some) == len(others)
    assert [is_little for is_little, _ in found] == [False, False]


def test_a_container_that_is_made_after_the_first_walk_is_named() -> None:
    memory, kept = Memory(), dict[str, list[Any]]()
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(300):
        noise = 4 * MIB if step == 40 else 0
        if step >= 100:  # such as activations after a warm-up
            kept.setdefault("layer", []).extend(memory.take(1))
        growers = search.step_ended(step, memory.level + noise)
        found = [holder_of_growth(one).title for one in growers or []] or found
        del growers
    [title] = found
    assert "`kept['layer']`, a list" in title
    assert "gains one tensor per step" in title


def test_what_a_container_gains_during_a_long_walk_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program_walk, "_SLICE", 0.0)  # each step visits one variable
    memory, kept = Memory(), list[Any]()
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(600):
        kept.extend(memory.take(1))
        growers = search.step_ended(step, memory.level)
        found = [(one.gained, one.steps) for one in growers or []] or found
        del growers
    [(gained, steps)] = found
    assert gained == pytest.approx(steps, abs=1)


def test_levels_that_go_up_and_down_do_not_use_up_the_walks() -> None:
    memory, kept = Memory(), []
    search, found = PeriodicSearch(2 * MIB), []
    for step in range(600):
        if step >= 400:
            kept.append(memory.take(1))
        noise = 8 * MIB if step % 20 >= 10 else 0
        growers = search.step_ended(step, memory.level + noise)
        found = [holder_of_growth(one).title for one in growers or []] or found
        del growers
    [title] = found
    assert "`kept`, a list" in title


def test_levels_that_do_not_rise_name_nothing() -> None:
    history: list[Any] = []
    assert named(lambda _: history.extend([tensor()]), Memory()) == []


def test_nothing_of_the_program_is_kept_alive() -> None:
    memory, history = Memory(), [tensor()]
    search = PeriodicSearch(2 * MIB)
    for step in range(100):
        if step % EVERY == EVERY - 1:
            history.extend(memory.take())
        search.step_ended(step, memory.level)
    alive = [weakref.ref(one) for one in history]
    gc.disable()
    history.clear()
    try:
        assert all(one() is None for one in alive)
    finally:
        gc.enable()


class Hostile(list[Any]):
    """A list whose methods must not run."""

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


def test_methods_of_the_program_are_not_called() -> None:
    memory, hostile = Memory(), Hostile()
    holder = only(named(lambda _: list.extend(hostile, memory.take()), memory))
    assert "`hostile`, a Hostile" in holder.title


def test_a_search_ends_after_a_limited_number_of_steps() -> None:
    search = PeriodicSearch(2 * MIB)
    for step in range(periodic_search._MAX_STEPS + 2):
        search.step_ended(step, 500 * MIB)
    assert search.has_ended


def test_a_container_that_grows_every_500_steps_is_followed_for_longer() -> None:
    memory, history = Memory(), list[Any]()
    found = named(lambda _: history.extend(memory.take()), memory, steps=3_000, every=500)
    assert found[-1][0] > periodic_search._MAX_STEPS + 500
    assert "every 500 steps" in only(found).title


def test_a_path_leads_to_the_object_again() -> None:
    trainer = Trainer()
    trainer.metric.kept.append(1)
    first = ProgramWalk(CallingLines())
    while not first.go_on():
        pass
    trainer.metric.kept.append(2)
    second = ProgramWalk(CallingLines(), first.lengths)
    while not second.go_on():
        pass
    [grown] = [one for one in second.grown if one.path.start.name == "trainer"]
    assert (grown.before, grown.now) == (1, 2)
    chain = follow(grown.path)
    assert chain is not None
    assert chain.objects[-1] is trainer.metric.kept
    del trainer.metric.kept
    assert follow(grown.path) is None


def test_an_element_weighs_what_it_does_not_share() -> None:
    base = torch.empty(2 * MIB)
    weight = ElementWeight()
    weight.add([[base[:10]]])
    weight.forget_counts()
    weight.add([[base[10:20], tensor()]])
    assert weight.own == pytest.approx(MIB, rel=0.05)
    assert weight.tensors == 2


def test_a_holder_that_is_known_is_weighed_less_and_less_often() -> None:
    memory, kept = Memory(), []
    found = named(lambda _: kept.append(memory.take()), memory, steps=1_000, every=10)
    steps = [step for step, _ in found]
    assert 5 < len(steps) < 20
    assert steps[-1] > 600
    assert all("kept" in holders[0].title for _, holders in found[1:])
