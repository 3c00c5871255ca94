"""The objects that the garbage collector tracks, while a tuple is being built."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

from memlog._internal.inert_access import tracked_objects


class Kept:
    pass


def test_a_tuple_that_is_being_built_can_be_finished() -> None:
    """With ``gc.get_objects``, Python raised a SystemError in the program's own ``tuple(…)``."""
    held: list[Any] = []

    def numbers() -> Iterator[int]:
        yield 1
        held.append(tracked_objects())
        yield 2

    assert tuple(numbers()) == (1, 2)
    assert held[0]


def test_all_other_objects_are_there() -> None:
    kept = [Kept(), [1], {"a": []}, {1, 2}]
    gc.collect()
    found = {id(one) for one in tracked_objects()}
    assert found >= {id(one) for one in kept if gc.is_tracked(one)}
    assert not any(type(one) is tuple for one in tracked_objects())


def test_the_list_leaves_nothing_behind() -> None:
    kept = Kept()
    gone = weakref.ref(kept)
    gc.collect()
    gc.disable()
    try:
        found = tracked_objects()
        assert any(one is kept for one in found)
        del found, kept
        assert gone() is None
    finally:
        gc.enable()
