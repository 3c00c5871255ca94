"""When a container that grows at each rise is told as a suspect, and when it is reported."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch

from memlog._internal.diagnostics import Diagnostics
from memlog.events import HOST_ANON, SHARED, Batch, Event, Finding, Inquiry, Trace
from memlog.facts.growth_findings import FREE_LISTS
from memlog.growth.series import Suspicion
from memlog.leaks import inquiry
from memlog.leaks.holders import Holder
from memlog.leaks.inquiry import GrowthInquiry
from memlog.leaks.other_causes import cause_in_traces
from memlog.torchside import internals

pytestmark = pytest.mark.usefixtures("only_this_file")

MIB = 2**20
EVERY = 30


def shorten(some: Any, limit: int) -> None:
    """Keep the newest elements. In a function of its own, so that memlog can't see the limit beforehand."""
    del some[:-limit]


class Training:
    """A training that keeps tensors at each evaluation, and whose process grows by their bytes."""

    def __init__(self, rise: int = 10, every: int = EVERY) -> None:
        self.events: list[Event] = []
        self.diagnostics = Diagnostics()
        self.inquiry = GrowthInquiry(
            self.events.append, self.diagnostics, lambda: False, time.monotonic()
        )
        self.kept: list[Any] | deque[Any] = []
        self.rise = rise
        self.every = every
        self.step = 0
        self.level = 500 * MIB

    def evaluate(self, count: int, *, limit: int | None = None) -> None:
        """Train up to the step after ``count`` more evaluations. Keep the ``limit`` newest tensors."""
        end = (self.step // self.every + count) * self.every + min(5, self.every - 1)
        while self.step < end:
            self.step += 1
            if self.step % self.every == 0:
                self.level += self.rise * MIB
                self.keep(torch.empty(10 * MIB // 4))
                if limit is not None:
                    shorten(self.kept, limit)
            batch = Batch(0, self.step, None, None, None, rss_anon=self.level)
            self.inquiry.after_step(self.step, batch)

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)

    def keep_nothing(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            batch = Batch(0, self.step, None, None, None, rss_anon=self.level)
            self.inquiry.after_step(self.step, batch)

    def growth(self) -> Suspicion:
        rate = self.rise * MIB / self.every
        return Suspicion(HOST_ANON, 0, rate, 0.9 * rate, 1.1 * rate, self.level, None, self.step)

    @property
    def findings(self) -> list[Finding]:
        return [event for event in self.events if isinstance(event, Finding)]

    @property
    def suspects(self) -> list[str]:
        newest = [event for event in self.events if isinstance(event, Inquiry)][-1:]
        return [one.title for event in newest for one in event.suspects]


def test_a_holder_is_a_suspect_at_the_second_rise_and_reported_at_the_fourth() -> None:
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(1)
    assert training.suspects == []
    training.evaluate(1)
    [suspect] = training.suspects
    assert "training.kept" in suspect
    training.evaluate(1)
    assert training.findings == []
    training.evaluate(1)
    [found] = training.findings
    assert found.title == suspect
    assert (found.kind, found.memory, found.confidence) == ("kept_tensors", "host", "medium")
    assert found.rate == pytest.approx(10 * MIB / EVERY, rel=0.1)
    assert training.suspects == []
    training.evaluate(5)
    assert training.findings == [found]


def test_lists_that_grow_together_are_told_with_their_number() -> None:
    training = Training(every=1)
    of_classes = tuple([] for _ in range(4))
    training.kept = deque(of_classes)  # a list for each class

    def keep(tensor: torch.Tensor) -> None:
        of_classes[training.step % 4].append(tensor)

    training.keep = keep  # type: ignore[method-assign]
    training.evaluate(20)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(40)
    training.inquiry.confirmed(training.growth())
    assert training.diagnostics.faults == {}
    [found] = training.findings
    assert "4 containers" in found.title


def test_confirmed_growth_has_the_holder_for_a_cause_after_two_rises() -> None:
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(2)
    training.inquiry.suspected(training.growth())
    assert not training.inquiry.searching  # the costly search is not needed
    training.inquiry.confirmed(training.growth())
    [found] = training.findings
    assert "training.kept" in found.title
    assert found.since_step == 0


def test_growth_that_was_reported_without_a_cause_gets_one_later() -> None:
    training = Training()
    training.evaluate(4)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.inquiry.confirmed(training.growth())
    assert [found.kind for found in training.findings] == ["growth"]
    training.evaluate(2)
    assert [found.kind for found in training.findings] == ["growth", "kept_tensors"]


def test_a_container_that_holds_a_third_of_the_growth_is_a_suspect_and_the_cause_if_no_other_is() -> (
    None
):
    training = Training(rise=30)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 30 * MIB)
    training.evaluate(3)
    assert not training.inquiry._periodic.holders
    [suspect] = training.suspects
    assert "training.kept" in suspect
    training.inquiry.confirmed(training.growth())
    [found] = training.findings
    assert found.title == suspect


def test_copies_that_are_kept_at_irregular_steps_are_reported_at_the_fourth_rise() -> None:
    """Such as a checkpoint whenever the loss is the best so far."""
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    for steps in (14, 80, 15, 75, 16):
        training.step += steps
        training.every = training.step + 1  # the next step evaluates
        training.evaluate(1)
    [found] = training.findings
    assert "training.kept" in found.title


def test_a_container_that_holds_a_fifth_of_the_growth_is_a_suspect() -> None:
    training = Training(rise=50)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 50 * MIB)
    training.evaluate(3)
    assert not training.inquiry._periodic.holders
    assert ["training.kept" in one for one in training.suspects] == [True]
    assert training.findings == []


def test_a_container_that_holds_a_tenth_of_the_growth_is_no_suspect() -> None:
    training = Training(rise=100)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 100 * MIB)
    training.evaluate(3)
    assert training.inquiry._periodic.newest[1]
    assert training.suspects == []


def test_a_window_that_holds_a_third_and_will_fit_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a replay buffer: the C library's free memory between its elements grows with it."""
    monkeypatch.setattr(inquiry, "_free", lambda _: 10_000 * MIB)
    training = Training(rise=30, every=1)
    training.kept = deque(maxlen=200)  # 2,000 MiB, and 6,000 MiB with what lies between
    training.evaluate(10)
    training.inquiry.rises(HOST_ANON, 1, 30 * MIB)
    training.evaluate(40)
    training.inquiry.confirmed(training.growth())
    assert training.findings == []
    newest = [event for event in training.events if isinstance(event, Inquiry)][-1]
    assert newest.will_fit
    assert ["training.kept" in one.title for one in newest.suspects] == [True]


def test_a_search_for_holders_waits_for_some_rises_if_memory_rises_in_stairs() -> None:
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.inquiry.suspected(training.growth())
    assert not training.inquiry.searching
    training.kept = []  # what grows is none of the containers that the walk has seen
    training.evaluate(2, limit=1)
    assert not training.inquiry.searching
    training.evaluate(1, limit=1)
    assert training.inquiry.searching
    training.inquiry.finish()


def test_a_container_that_keeps_the_last_few_is_not_reported() -> None:
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(12, limit=5)
    assert training.findings == []
    assert training.suspects == []


def early(free: int | None, steps: int, limit: int | None = None) -> Training:
    """Return a training that keeps 10 MiB at each step, in a process that has ``free`` bytes left."""
    training = Training(every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inquiry, "host_free", lambda _: free)
        training.evaluate(10)
        training.inquiry.suspected(training.growth(), is_early=True)
        training.evaluate(steps - 10, limit=limit)
    return training


def test_a_replay_buffer_that_fits_is_only_a_possible_cause() -> None:
    training = Training()
    training.kept = deque(maxlen=100)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(4)
    training.inquiry.confirmed(training.growth())
    training.evaluate(4)
    training.inquiry.finish()
    assert training.findings == []
    newest = [event for event in training.events if isinstance(event, Inquiry)][-1]
    assert newest.will_fit
    assert "`training.kept`, a deque" in newest.suspects[0].title
    assert "at most 100 elements (1000.0 MiB)" in newest.suspects[0].title


@pytest.mark.parametrize("searched", [True, False])
def test_growth_begins_later_than_the_rise_that_led_to_the_search(searched: bool) -> None:
    training = Training()
    training.keep_nothing(20)
    if searched:
        training.inquiry.rises(HOST_ANON, 10, 10 * MIB)
    training.keep_nothing(280)
    if not searched:  # the container has a little already
        training.evaluate(2)
        training.inquiry.rises(HOST_ANON, 10, 10 * MIB)
    training.evaluate(6)
    [finding] = training.findings
    assert finding.since_step == pytest.approx(300, abs=EVERY + 5)


class Buffer:
    """A replay buffer that a program limits by itself."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def append(self, row: Any) -> None:
        if len(self.rows) < 100:
            self.rows.append(row)


def test_a_list_that_the_program_limits_is_only_a_possible_cause_while_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    training.kept = Buffer()  # type: ignore[assignment] # has the method that is called
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(6)
    training.inquiry.confirmed(training.growth())
    assert training.findings == []
    newest = [event for event in training.events if isinstance(event, Inquiry)][-1]
    assert newest.will_fit
    assert "`training.kept.rows`, a list" in newest.suspects[0].title
    limited = "its length has a limit in the program (test_periodic_inquiry.py:"
    assert any(limited in line for line in newest.suspects[0].evidence)
    # It holds 80 MiB, and may hold four times as much.
    monkeypatch.setattr(inquiry, "host_free", lambda _: 200 * MIB)
    training.evaluate(2)
    assert ["training.kept.rows" in one.title for one in training.findings] == [True]


def test_a_replay_buffer_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "host_free", lambda _: 900 * MIB)
    training = Training()
    training.kept = deque(maxlen=100)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(6)
    [finding] = training.findings
    assert "`training.kept`, a deque" in finding.title
    assert finding.remedy == "Lower its limit, or keep smaller elements, or keep them on disk."


def test_a_limit_does_not_excuse_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.empty(1, requires_grad=True)
    monkeypatch.setattr(torch, "empty", lambda size: (made * torch.ones(size)).sum())
    training = Training()
    training.kept = deque(maxlen=100)
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(6)
    assert [one.kind for one in training.findings] == ["kept_graph"]


def test_an_early_rise_is_explained_without_the_search_that_holds_up_steps() -> None:
    training = early(None, 40)
    assert not training.inquiry.searching
    [suspect] = training.suspects
    assert "training.kept" in suspect
    assert training.findings == []
    training.inquiry.confirmed(training.growth())
    assert not training.inquiry.searching
    [found] = training.findings
    assert "training.kept" in found.title


def test_the_search_that_holds_up_steps_waits_if_one_for_rises_has_begun_before() -> None:
    training = Training(rise=1, every=5)
    training.evaluate(4)
    training.inquiry.rises(HOST_ANON, 5, MIB)
    training.inquiry.suspected(training.growth())
    assert not training.inquiry.searching


def test_another_suspect_takes_the_place_of_the_first() -> None:
    training = Training(every=1)
    training.evaluate(10)
    training.inquiry.suspected(training.growth(), is_early=True)
    line = Holder(
        "python_memory", "Objects made at a.py:3.", "a.py:3", 6.0 * MIB, (), "medium", None
    )
    training.inquiry._holders = (line,)
    growth = training.growth()
    training.inquiry._tell_suspects(growth, 10, training.inquiry._named(growth))
    assert training.suspects == [line.title]
    training.evaluate(30)
    [suspect] = training.suspects
    assert "training.kept" in suspect


def test_growth_that_takes_much_of_the_free_memory_is_reported_before_it_is_confirmed() -> None:
    [found] = early(free=10_000 * MIB, steps=75).findings
    assert "training.kept" in found.title
    assert 64 <= found.step < 75
    assert early(free=100_000 * MIB, steps=75).findings == []


def test_an_early_rise_without_a_container_that_grows_is_searched_in_the_other_way() -> None:
    training = early(None, 55, limit=1)
    assert training.inquiry.searching
    training.inquiry.finish()


def test_at_the_end_a_rise_less_is_enough_if_the_next_one_is_not_overdue() -> None:
    training = Training()
    training.evaluate(2)
    training.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    training.evaluate(3)
    assert training.findings == []
    training.inquiry.finish()
    [found] = training.findings
    assert "training.kept" in found.title

    stopped = Training()
    stopped.evaluate(2)
    stopped.inquiry.rises(HOST_ANON, EVERY, 10 * MIB)
    stopped.evaluate(3)
    stopped.rise = 0
    stopped.evaluate(2, limit=5)
    stopped.inquiry.finish()
    assert stopped.findings == []


def test_at_the_end_frequent_rises_with_a_sure_holder_are_reported() -> None:
    training = early(None, 50)
    assert training.findings == []
    training.inquiry.finish()
    [found] = training.findings
    assert "training.kept" in found.title

    bounded = early(None, 50, limit=20)
    bounded.inquiry.finish()
    assert bounded.findings == []


def test_the_allocator_is_not_blamed_if_a_list_of_losses_grows() -> None:
    training = Training()
    losses = Holder("kept_graph", "`losses` gains.", "train.py:3", 4_000.0, (), "high", "Append …")
    training.inquiry._holders = (losses,)
    training.inquiry.confirmed(training.growth()._replace(series=FREE_LISTS))
    [found] = training.findings
    assert found.title.startswith("`losses` gains.")
    assert "`.item()`" in (found.remedy or "")


def test_shared_memory_that_grows_has_the_list_that_keeps_it_for_a_cause() -> None:
    training = Training()
    batches = Holder("kept_tensors", "`seen` gains.", "train.py:3", 10.0 * MIB, (), "high", None)
    training.inquiry._holders = (batches,)
    training.inquiry.confirmed(training.growth()._replace(series=SHARED))
    [found] = training.findings
    assert found.title == "`seen` gains."


def traced(step: int, **at_peak: int) -> Trace:
    sizes = {name.replace("_", " "): size * MIB for name, size in at_peak.items()}
    return Trace(0, step, "dispatch", True, 100 * MIB, sizes, (), None, device="host")


def test_without_a_holder_two_traced_steps_tell_what_grows() -> None:
    traces = [
        traced(0, parameters=20),
        traced(2, parameters=20, optimizer_state=40, buffers=1),
        traced(400, parameters=20, optimizer_state=42, buffers=120),
    ]
    training = Training()
    growth = training.growth()._replace(step=410)
    cause = cause_in_traces(traces, growth)
    assert cause is not None
    assert cause.title == "Buffers grow by 306.2 KiB per step."
    assert cause.evidence == ("exact in traced steps: 1.0 MiB in step 2, 120.0 MiB in step 400",)
    assert cause_in_traces(traces[:2], growth) is None
    assert cause_in_traces(traces, growth._replace(series="cuda0.allocated")) is None
    assert cause_in_traces(traces, growth._replace(rate=growth.rate * 3)) is None
    training.inquiry._traces = traces
    training.inquiry.confirmed(growth)
    [found] = training.findings
    assert (found.kind, found.title) == ("kept_tensors", cause.title)


def test_growth_in_compiled_code_tells_that_it_was_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    monkeypatch.setattr(internals, "compiler_in_use", lambda: True)
    growth = training.growth()._replace(step=400, rate_low=300_000.0, rate_high=400_000.0)
    training.inquiry.confirmed(growth)
    [found] = training.findings
    assert found.kind == "growth"
    assert "Tensors that compiled code (torch.compile) makes were not watched." in found.evidence
    assert (found.remedy or "").startswith("Run some steps with TORCH_COMPILE_DISABLE=1")


def test_with_the_compiler_switched_off_tensors_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(internals, "_compiler_backends", lambda: (object(),))
    assert internals.compiler_in_use()
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not internals.compiler_in_use()
