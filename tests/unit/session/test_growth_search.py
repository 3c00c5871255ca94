"""What the training process does with verdicts on its growth that the helper process sends."""

import gc
import time
from collections.abc import Iterator

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog.events import HOST_ANON, Event, Finding, Inquiry
from memlog.facts.judge import GrowthNews
from memlog.growth.series import Suspicion, Verdict
from memlog.leaks.holders import Holder, HolderKind
from memlog.session import growth_search
from memlog.session.growth_search import GrowthSearch

MIB = 2**20


@pytest.fixture
def no_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


class Node:
    def __init__(self) -> None:
        self.itself, self.values = self, bytearray(b"x") * (40 * MIB)


def growth(step: int) -> Suspicion:
    return Suspicion(HOST_ANON, 0, 0.3 * MIB, 0.29 * MIB, 0.31 * MIB, 500 * MIB, None, step)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("has_torch", [True, False])
def test_a_verdict_from_before_a_collection_does_not_count_after_it(
    has_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper process judged the levels before it saw that garbage explained them."""
    monkeypatch.setattr(growth_search, "is_installed", lambda _: has_torch)
    published: list[Event] = []
    search = GrowthSearch(
        published.append, Diagnostics(), lambda: False, lambda: 150, time.monotonic()
    )
    Node()
    judged: list[tuple[Verdict, int]] = [("suspected", 140), ("confirmed", 150)]
    for number, (verdict, step) in enumerate(judged, 1):
        search.take(GrowthNews(verdict, number, growth(step)))
    assert [event.garbage for event in published if isinstance(event, Inquiry)] == [True]
    assert not any(isinstance(event, Finding) for event in published)
    search.take(GrowthNews("confirmed", 3, growth(250)))
    search.finish()
    (found,) = (event for event in published if isinstance(event, Finding))
    assert ("pip install torch" in (found.remedy or "")) is not has_torch


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    ("kind", "told"), [("kept_tensors", "kept_tensors"), ("reference_cycles", None)]
)
def test_what_a_function_held_until_it_returned_is_no_garbage(
    kind: HolderKind, told: str | None
) -> None:
    """A search that began early found the holder. The growth test confirms the growth at the end."""
    published: list[Event] = []
    search = GrowthSearch(
        published.append, Diagnostics(), lambda: False, lambda: 150, time.monotonic()
    )
    found = Holder(
        kind, "`kept`, a list, gains one tensor per step.", None, 0.3 * MIB, (), "high", None
    )
    search._inquiry._holders = (found,)  # a real search takes many steps
    Node()
    search.ends()
    search.take(GrowthNews("confirmed", 1, growth(150)))
    search.finish()
    assert [event.kind for event in published if isinstance(event, Finding)] == [told][: bool(told)]


def test_garbage_that_waits_at_the_end_is_only_a_possible_cause() -> None:
    """A collection has run before the suspicion, so none runs at the end."""
    published: list[Event] = []
    search = GrowthSearch(
        published.append, Diagnostics(), lambda: False, lambda: 150, time.monotonic()
    )
    search.take(GrowthNews("suspected", 1, growth(80)))
    title = "Tensors made at train.py:3 wait in reference cycles for Python's garbage collector."
    found = Holder("reference_cycles", title, None, 0.8 * MIB, (), "medium", None)
    search._inquiry._holders = (
        found,
    )  # a real search takes many steps, and tells that it has begun
    search._inquiry._tell(HOST_ANON, 90, searching=True)
    search.ends()
    search.take(GrowthNews("confirmed", 2, growth(150)))
    search.finish()
    assert not [event for event in published if isinstance(event, Finding)]
    [suspect] = [event for event in published if isinstance(event, Inquiry)][-1].suspects
    assert suspect.title == title


@pytest.mark.parametrize("is_full", [False, True])
def test_a_container_that_was_full_before_the_confirmation_is_not_named(*, is_full: bool) -> None:
    published: list[Event] = []
    search = GrowthSearch(
        published.append, Diagnostics(), lambda: False, lambda: 150, time.monotonic()
    )
    recent = [object() for _ in range(60 if is_full else 110)]
    title = "`recent`, a list, gains one element per step."
    container = id(recent), 50, 1.0
    found = Holder("growing_container", title, None, 0.3 * MIB, (), "high", None, None, container)
    search.take(GrowthNews("suspected", 1, growth(80)))
    search._inquiry._holders = (found,)  # a real search takes many steps
    search._inquiry._found_at = 90
    search.take(GrowthNews("confirmed", 2, growth(150)))
    search.finish()
    named = [event.title for event in published if isinstance(event, Finding)]
    assert (title in named) is not is_full
