"""Containers that grow with the memory: readings of their lengths, and what their newest elements weigh."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

from torch.utils.data import Dataset

from memlog._internal.inert_access import container_base, container_length, instance_dict, is_kind
from memlog.leaks import assignment_lines
from memlog.leaks.containers import ElementWeight, filled, newest_elements, oldest_element
from memlog.leaks.live_tensors import VIEWS, gradient_of
from memlog.leaks.owner_chain import Chain, NamePath, follow
from memlog.leaks.owner_text import (
    HOOKS,
    PYPLOT_FIGURES,
    Owner,
    describe,
    describe_container,
    is_queue,
    program_files,
)
from memlog.leaks.program_walk import buffer_bytes, is_buffer, is_state_of

_OFTEN: Final = 0.75
"""If less than this part of the memory came at rises at which a container grew, memory rises without it. It
is not named then, unless `_LEAST` or `_MOST` applies."""
_LEAST: Final = 0.1
"""Containers that each hold this part of the growth or more are named if `_OFTEN` is reached together."""
_MOST: Final = 0.6
"""A container is named whose bytes are at least this part of the growth, and at most its inverse."""
_RECENT: Final = 4
"""A container that did not grow at the newest `_RECENT` rises is not named at all."""
_SAMPLE: Final = 6
"""Maximum number of a container's newest elements that are weighed."""
_SAMPLED: Final = 5_000
"""Objects and graph nodes. If the elements have more, fewer elements are weighed."""
_SHARED: Final = 4_000
"""Instead of `_SAMPLE`, if the tensors of the elements are parts of larger ones, which they may share."""
_WEIGHING: Final = 0.1
"""Processor seconds for weighing the elements of all candidates. If it takes longer, none is named."""
_ENOUGH: Final = 0.4
"""If candidates together hold less than this part of the growth, none is named. Small tensors that are kept
between others that are freed make the process grow by up to twice their bytes."""
_LITTLE: Final = 0.01
"""Containers of tensors that together hold less than `_ENOUGH`, each at least this part, are returned, too:
the growth can be free memory between their elements. A replay buffer of images of 28 KiB, in steps that
free tensors of 3.6 MiB, holds 4 % of the growth."""
_ALL: Final = 1.7
"""If candidates together hold more than this multiple of the growth, several hold the same memory, or the
measure is wrong. Then none is named."""
_PART: Final = 0.25
"""A candidate that holds less than this part of the growth is not named."""
_REGULAR: Final = 0.25
"""If the usual gain of a container, over the usual time, differs by more than this part from its mean, it
does not grow in stairs."""
FREQUENT: Final = 0.75
"""Elements per step. If fewer are gained, their number in all steps is told."""
_REGULAR_GAPS: Final = 0.75
"""A container that gains at least `FREQUENT` elements per step grows in stairs only if this part of the times
between the rises are alike."""
_ALIKE: Final = 0.1
"""Elements of one container that gain at least this part of what the first gains are counted together."""
_OUTSIDE: Final = _ENOUGH
"""If memlog sees more than this part of the growth, nothing is named for the rest."""


class Identity(NamedTuple):
    """Identities of a container and of its oldest element, and a weak reference to that element.

    A tuple has no weak references. It is known by one of its items.
    """

    container: int
    oldest: int | None
    """``None`` if there is no element, or the first slot is empty."""
    reference: weakref.ref[Any] | None


class RiseReading(NamedTuple):
    """Length of a candidate, and level of the memory, after a rise. Buffers have bytes for a length.

    ``rise`` is the first step of the rise, ``step`` that of the reading. ``slots`` is the length with empty
    slots, a ``deque``'s ``maxlen``, or the number of samples of which a data set may keep each; 0 if unknown.
    """

    rise: int
    step: int
    length: int
    level: int
    identity: Identity | None = None
    """``None`` if unknown."""
    slots: int = 0


class Grower(NamedTuple):
    """A container that grows with the memory.

    Attributes:
        chain: Objects from the variable to the container.
        gained: Elements that it gained over ``rises`` rises; bytes for a tensor or an array.
        rises: Number of rises over which it was measured, at which it grew.
        steps: Number of steps over which it was measured.
        each: Elements that it usually gains at a rise.
        every: Usual number of steps from one of these rises to the next; 0 if there was only one.
        bytes_gained: Bytes that the gained elements hold.
        growth: Bytes by which the memory rose meanwhile.
        graph: Part of ``bytes_gained`` that only autograd graphs keep.
        tensors: Number of tensors in an element.
        foreign: Class of the objects whose memory Python does not see, if these explain the growth; or empty.
        is_partial: True if an element has too many objects to be weighed, and these explain the growth.
        readings: Number of rises at which it was longer than before.
        is_buffer: True for a tensor or an array that is replaced by a larger one.
        group: Equal for containers that can be counted together: elements of one container, such as a list
            for each key, and an attribute of several objects of a class, such as of each layer.
        is_replaced: True if it was replaced by a longer one, or its first element was.
        is_one: True if only the first element tells that it was replaced, and it has just grown.
        is_steady: True if memory or the container grows steadily, not in stairs.
        containers: Number of containers that are counted together.
        are_views: True if the elements' tensors are small parts of larger ones, which they keep.
        slots: Number of elements that it can have; 0 if it has no limit, or an unknown one.
        bytes_left: Bytes that it can still gain; ``None`` if it has no limit, or an unknown one.
        is_little: True if the containers found hold too little of the growth to be its cause by themselves.
        is_beside: True if memory also rises without it.
        risen_at: First steps of the rises at which it grew, and their bytes.
    """

    chain: Chain
    gained: int
    rises: int
    steps: int
    each: float
    every: float
    bytes_gained: float
    growth: float
    graph: float
    tensors: float
    foreign: str
    readings: int
    is_buffer: bool
    is_replaced: bool
    is_one: bool
    group: object
    is_steady: bool = False
    containers: int = 1
    are_views: bool = False
    is_partial: bool = False
    slots: int = 0
    bytes_left: float | None = None
    is_little: bool = False
    is_beside: bool = False
    risen_at: Mapping[int, int] = {}

    @property
    def filled_in(self) -> float:
        """Steps in which it would have gained all that it contains; infinite if several are counted."""
        if self.containers > 1:
            return math.inf
        return length_of(self.chain.objects[-1]) * self.steps / self.gained

    @property
    def is_pile_of_hooks(self) -> bool:
        """True for a dictionary in which a module or a tensor has its hooks."""
        return HOOKS in owner_of(self).name

    @property
    def is_by_elimination(self) -> bool:
        """True if memlog does not see the bytes, and no other container can hold them."""
        return bool(self.foreign) or self.is_partial

    @property
    def explained(self) -> float:
        return self.bytes_gained / self.growth


class Candidate(NamedTuple):
    """A container that may grow with the memory, and its readings, one after each rise."""

    path: NamePath
    readings: list[RiseReading]
    is_replaced_first: bool

    @property
    def is_one(self) -> bool:
        """True if it has had one identity all the time. Another object can have had the same one."""
        containers = {identity.container for identity in self._identities()}
        return len(containers) <= 1 and not self.is_replaced_first

    def _identities(self) -> list[Identity]:
        return [reading.identity for reading in self.readings if reading.identity is not None]

    @property
    def is_replaced(self) -> bool:
        """True if it has not been the same object all the time, or its first element has not."""
        if not self.is_one:
            return True
        known = self._identities()
        # A new container and a new element can have the identities of those that were freed. If another
        # element is the first one now, the program can have put it before the others.
        is_other = len({past.oldest for past in known} - {None}) > 1
        is_unknown = is_other and any(past.oldest and past.reference is None for past in known)
        is_freed = any(past.reference is not None and past.reference() is None for past in known)
        return is_unknown or is_freed


def growers_of(candidates: Sequence[Candidate], *, in_stairs: bool) -> list[Grower]:
    """Return the candidates that explain the growth, the largest part first. Empty: none do.

    If containers of tensors hold a little of it, these are returned (`Grower.is_little`). If ``in_stairs`` is
    true, memory rises at once, and stays as it is between the rises.
    """
    late = time.thread_time() + _WEIGHING
    weighed = []
    for measured in _measured(candidates):
        if time.thread_time() > late:
            return []
        grower = _weighed(measured, in_stairs=in_stairs)
        weighed += [] if grower is None else [grower]
    growers = _with_unseen(_joined(_coincident(_with_hooks(weighed), candidates)))
    named = [grower for grower in growers if grower.explained >= _PART and _is_kept(grower)]
    explained = sum(grower.explained for grower in named)
    if explained > _ALL:
        return []
    if explained < _ENOUGH:
        little = [grower for grower in growers if grower.tensors and grower.explained >= _LITTLE]
        named = [grower._replace(is_little=True) for grower in little if _is_kept(grower)]
    return sorted(named, key=lambda grower: -grower.explained)


def _with_hooks(growers: list[Grower]) -> list[Grower]:
    """Return the growers. What the hooks in a growing dictionary of hooks keep counts for the dictionary.

    If each evaluation registers a hook, all earlier hooks run again, too. So each of them keeps, in a list of
    its own, the same outputs.
    """
    piles = {id(grower.chain.objects[-1]): grower for grower in growers if grower.is_pile_of_hooks}
    inside: dict[int, float] = {}
    others = []
    for grower in growers:
        key = next((id(owner) for owner in grower.chain.objects[:-1] if id(owner) in piles), None)
        if key is None:
            others.append(grower)
        else:
            inside[key] = max(grower.explained, inside.get(key, 0.0))
    parts = [
        max(grower.explained, inside.get(id(grower.chain.objects[-1]), 0.0)) for grower in others
    ]
    pairs = zip(others, parts, strict=True)
    return [grower._replace(bytes_gained=part * grower.growth) for grower, part in pairs]


def _coincident(growers: list[Grower], candidates: Sequence[Candidate]) -> list[Grower]:
    """Return the growers without those beside which memory also rises for other reasons.

    Memory can rise when another one of them grows. And if a grower's bytes are the growth, what rises
    besides comes and goes from step to step.
    """
    heavy = [grower for grower in growers if grower.explained >= _LEAST]
    together = {rise: size for grower in heavy for rise, size in grower.risen_at.items()}
    every = {
        after.rise: after.level - before.level
        for candidate in candidates
        for before, after in pairwise(candidate.readings)
    }
    begun = max((min(grower.risen_at) for grower in heavy if grower.risen_at), default=0)
    risen = sum(size for rise, size in every.items() if rise >= begun)
    met = sum(size for rise, size in together.items() if rise >= begun)
    is_all = len(heavy) > 1 and met >= _OFTEN * risen
    return [
        grower
        for grower in growers
        if not grower.is_beside
        or _MOST <= grower.explained <= 1 / _MOST
        or (is_all and grower.explained >= _LEAST)
    ]


def reading_of(chain: Chain | None, rise: int, step: int, length: int, level: int) -> RiseReading:
    """Return a reading of the container at the end of ``chain``."""
    identity = None if chain is None else _identity(chain.objects[-1])
    slots = 0 if chain is None else _slots(chain)
    return RiseReading(rise, step, length, level, identity, slots)


def newest_of(container: Any) -> Any:
    """Return the newest element of a container; ``None`` if it has none, or one without an identity."""
    base = container_base(container)
    if base is None or is_buffer(type(container)):
        return None
    newest = newest_elements(container, base, 1)
    value = newest[0] if newest else None
    if base is dict and value is not None:
        value = value[1]
    # Equal numbers or texts can be one object. So their identity tells nothing.
    return None if type(value) in (int, float, str, bool, bytes) else value


def length_of(one: Any) -> int:
    """Return a container's number of elements, or a buffer's bytes; -1 for any other object."""
    if is_buffer(type(one)):
        return buffer_bytes(one)
    base = container_base(one)
    return -1 if base is None else filled(one, base)


def owner_of(grower: Grower) -> Owner:
    """Return the description of what grows."""
    if not grower.is_buffer:
        return describe_container(grower.chain)
    return describe(grower.chain, frozenset((id(grower.chain.objects[-1]),)))


def _measured(candidates: Sequence[Candidate]) -> list[tuple[Candidate, Chain]]:
    chains = [(candidate, follow(candidate.path)) for candidate in candidates]
    # One container can have several names: `multiprocessing` calls `__main__` also `__mp_main__`.
    containers = {
        id(chain.objects[-1]): (candidate, chain)
        for candidate, chain in reversed(chains)
        if chain is not None
    }
    # Reversed again. A dictionary keeps the last value of a key, so the first name of each container stays.
    pairs = list(containers.values())[::-1]
    newest = [newest_of(chain.objects[-1]) for _, chain in pairs]
    # Two containers with the same elements: to empty one of them frees nothing. So neither is named.
    return [
        pair
        for pair, own in zip(pairs, newest, strict=True)
        if own is None or sum(other is own for other in newest) == 1
    ]


def _identity(container: Any) -> Identity:
    base = container_base(container)
    oldest = [] if base is None or is_buffer(type(container)) else oldest_element(container, base)
    element = oldest[0][1] if base is dict and oldest else next(iter(oldest), None)
    if element is None:
        return Identity(id(container), None, None)
    for part in (element, *element) if type(element) is tuple else (element,):
        with contextlib.suppress(TypeError):  # no references to it, such as to a string
            return Identity(id(container), id(element), weakref.ref(part))
    return Identity(id(container), id(element), None)


def _slots(chain: Chain) -> int:
    container = chain.objects[-1]
    base = container_base(container)
    if base is None or is_buffer(type(container)):
        return 0
    most = _most_in_deque(chain) if base is deque else None
    length = container_length(container, base)
    if base is dict:
        most = _samples(chain) or None
    return length if most is None else max(int(most), length)


def _most_in_deque(chain: Chain) -> int | None:
    """Return a deque's ``maxlen``, or the ``maxsize`` of the queue that has it; ``None``: it has no limit."""
    queue = next(filter(is_queue, chain.objects[-3:-1]), None)
    if queue is None:
        most: int | None = deque.maxlen.__get__(chain.objects[-1])
        return most
    size = (instance_dict(queue) or {}).get("maxsize")
    return size if type(size) is int and size > 0 else None


def _samples(chain: Chain) -> int:
    """Return the length of the data set that has a dictionary of samples by their index; otherwise 0."""
    # The dictionary of its attributes can lie between.
    owner = next((outer for outer in chain.objects[-3:-1] if is_kind(outer, Dataset)), None)
    newest = newest_elements(chain.objects[-1], dict, 1)
    if owner is None or not newest or type(newest[0][0]) is not int:
        return 0
    # This method alone is the program's own that is called: a data loader calls it, too.
    with contextlib.suppress(Exception):
        return int(type(owner).__len__(owner))
    return 0


def _most_elements(candidate: Candidate, chain: Chain) -> int:
    """Return the number of elements that a container can have; 0 if it has no limit, or an unknown one.

    A list or dictionary has a limit if it had empty slots, and its length with them did not change.
    """
    known = [reading for reading in candidate.readings if reading.slots]
    if not known or len({reading.slots for reading in known}) > 1:
        return 0
    if not is_kind(chain.objects[-1], deque):
        has_slots = any(reading.length < reading.slots for reading in known)
        return known[0].slots if has_slots and len(known) > 1 else 0
    return 0 if _most_in_deque(chain) is None else known[0].slots


def _weighed(measured: tuple[Candidate, Chain], *, in_stairs: bool) -> Grower | None:
    candidate, chain = measured
    readings = candidate.readings
    # The memory of the first walk makes the first rise less certain than the later ones.
    first = readings[0] if len(readings) <= 2 else readings[1]  # noqa: PLR2004 - no later rise yet
    last, container = readings[-1], chain.objects[-1]
    gained, growth = last.length - first.length, last.level - first.level
    if gained <= 0 or growth <= 0:
        return None
    lengths = [reading.length for reading in readings]
    grew = [after > before for before, after in pairwise(lengths)]
    rises = sum(grew if first is readings[0] else grew[1:])
    risen = [after.level - before.level for before, after in pairwise(readings)]
    meanwhile = sum(rise for rise, did in zip(risen, grew, strict=True) if did)
    # Once it may be late, if another thread adds the elements.
    is_beside = not any(grew[-2:]) or meanwhile < _OFTEN * sum(risen)
    if is_beside and not any(grew[-_RECENT:]):
        return None  # it may be full
    own, graph, tensors, foreign = float(gained), 0.0, 1.0, ""
    are_views = is_partial = False
    if candidate.path.start.place == PYPLOT_FIGURES:
        own, tensors, is_partial = 0.0, 0.0, True  # most of a figure is outside Python
    elif not is_buffer(type(container)):
        weight = _weight(chain, gained)
        if weight is None:
            return None
        own, graph = (gained * total / weight.elements for total in (weight.own, weight.graph))
        tensors = weight.tensors / weight.elements
        foreign = weight.foreign.most_common(1)[0][0] if weight.foreign else ""
        are_views = weight.shown < VIEWS * weight.storages
        is_partial = weight.is_partial
    slots = _most_elements(candidate, chain)
    # What it gained until the first rise may have begun earlier.
    grown = [after for after, did in zip(readings[1:], grew, strict=True) if did]
    gaps = [after.rise - before.rise for before, after in pairwise(grown)]
    gains = [after.length - before.length for before, after in pairwise(grown)]
    each, every = (median(gains), median(gaps)) if gaps else (gained, 0)
    sizes = zip(readings[1:], risen, grew, strict=True)
    is_steady = not in_stairs or (bool(gaps) and not _is_regular(gaps, gains))
    # The walk after a rise can take many steps. In stairs, nothing grows meanwhile.
    is_whole = first is readings[0] or is_steady
    return Grower(
        chain=chain,
        gained=gained,
        rises=rises,
        steps=last.step - first.step if is_whole else last.rise - first.rise,
        each=each,
        every=every,
        bytes_gained=own + graph,
        growth=growth,
        graph=graph,
        tensors=tensors,
        foreign=foreign,
        readings=sum(grew),
        is_buffer=is_buffer(type(container)),
        is_replaced=candidate.is_replaced,
        is_one=candidate.is_one and grew[-1],
        are_views=are_views,
        is_partial=is_partial,
        group=_group(candidate.path, chain),
        is_steady=is_steady,
        is_beside=is_beside,
        risen_at={reading.rise: size for reading, size, did in sizes if did},
        slots=slots,
        bytes_left=(slots - last.length) * (own + graph) / gained if slots else None,
    )


def _is_regular(gaps: list[int], gains: list[int]) -> bool:
    """Return False if a container grows steadily. Its growth is only noticed when memory rises."""
    usual, mean = median(gains) / median(gaps), sum(gains) / sum(gaps)
    if abs(usual - mean) > _REGULAR * mean:
        return False
    alike = sum(abs(gap - median(gaps)) <= 1 for gap in gaps)
    return mean < FREQUENT or alike >= _REGULAR_GAPS * len(gaps)


def _group(path: NamePath, chain: Chain) -> object:
    container, *owners = chain.objects[::-1]
    kind, name = path.hops[-1] if path.hops else ("", "")
    if kind == "item":
        return id(owners[0]), type(container)
    if kind == "attr" and not is_kind(owners[0], type):
        # An attribute's name leads through the dictionary of attributes, if there is one.
        is_inside = len(owners) > 1 and instance_dict(owners[1]) is owners[0]
        return type(owners[1] if is_inside else owners[0]), name, type(container)
    return id(container)


def _is_kept(grower: Grower) -> bool:
    """Return False for what may be made anew, such as inputs and outputs of steps that become larger.

    If a container or a tensor was replaced, the program must have a statement that adds to the earlier one.
    Two lists that are made one after the other can have the same identity. So the program's statements tell
    this, too: the elements of one that they never make anew come and go, as in a buffer that is shuffled.
    """
    owner = owner_of(grower)
    files = program_files(owner) if owner.name else []
    if any(assignment_lines.adds_to_itself(file, owner.name) for file in files):
        return True
    anew = any(assignment_lines.is_made_anew(file, owner.name) for file in files)
    if anew or not grower.is_replaced:
        return not anew
    return grower.is_one and any(assignment_lines.additions(file, owner.name) for file in files)


def is_training_state(chain: Chain) -> bool:
    """Return True if the container is an optimizer's state. It grows as more layers are trained."""
    return any(is_state_of(owner, chain.objects[-1]) for owner in chain.objects[-3:-1])


def _weight(chain: Chain, gained: int) -> ElementWeight | None:
    """Return the weight of a container's newest elements, without what an older element holds, too.

    In an optimizer's state, the parameters' gradients count, too.
    """
    container = chain.objects[-1]
    base = container_base(container)
    if base is None:
        return None
    if is_training_state(chain):
        newest = newest_elements(container, base, min(_SAMPLE, gained))
        state = ElementWeight([container])
        state.add([(values, gradient_of(parameter)) for parameter, values in newest])
        return state if state.elements else None
    count = min(_SAMPLE, gained)
    # One more than is weighed: what an older element holds, too, was there before.
    elements = newest_elements(container, base, count + 1)
    has_older = filled(container, base) > gained
    older = elements[count:] if has_older else []
    weight = _weight_of(chain, elements[:count], older, base, _SAMPLED)
    if weight is not None and weight.shares:
        elements = newest_elements(container, base, min(_SHARED, gained))
        # The next older element can have a part of the same tensor. So the oldest one is compared.
        oldest = oldest_element(container, base) if has_older else []
        weight = _weight_of(chain, elements, oldest, base)
    return weight


def _weight_of(
    chain: Chain, elements: list[Any], older: list[Any], base: type, *enough: int
) -> ElementWeight | None:
    if base is dict:
        elements, older = ([value for _, value in pairs] for pairs in (elements, older))
    weight = ElementWeight(chain.objects)
    weight.add_older(older, elements)
    weight.add(elements, *enough)
    return weight if weight.elements else None


def _joined(growers: list[Grower]) -> list[Grower]:
    """Return the growers. Those of one `Grower.group` are one.

    One that gains little compared with another of these, such as a list of losses beside one of outputs,
    stays by itself. So does one whose bytes are unknown.
    """
    groups: dict[object, list[Grower]] = {}
    # The largest first, so that the others are compared with it.
    for grower in sorted(growers, key=lambda grower: -grower.bytes_gained):
        known = groups.setdefault((grower.group, grower.is_by_elimination), [])
        is_little = known and grower.bytes_gained < _ALIKE * known[0].bytes_gained
        if is_little and not grower.is_by_elimination:
            groups[id(grower)] = [grower]
        else:
            known.append(grower)
    return [functools.reduce(_sum, group) for group in groups.values()]


def _sum(one: Grower, other: Grower) -> Grower:
    # If one of the two has no known limit, their sum has none.
    left = [grower.bytes_left for grower in (one, other) if grower.bytes_left is not None]
    return one._replace(
        slots=one.slots + other.slots if len(left) > 1 else 0,
        bytes_left=sum(left) if len(left) > 1 else None,
        gained=one.gained + other.gained,
        each=one.each + other.each,
        is_steady=one.is_steady or other.is_steady,
        bytes_gained=one.bytes_gained + other.bytes_gained,
        graph=one.graph + other.graph,
        growth=max(one.growth, other.growth),
        readings=max(one.readings, other.readings),
        containers=one.containers + other.containers,
    )


def _with_unseen(growers: list[Grower]) -> list[Grower]:
    """Return the growers. If memlog sees little of the growth, one with unseen objects explains the rest.

    Objects are unseen if they are foreign, or too many. If several growers have such objects, it is unknown
    which of them holds the memory.
    """
    unseen = [grower for grower in growers if grower.is_by_elimination]
    seen = sum(grower.explained for grower in growers)
    if len(unseen) == 1 and seen < _OUTSIDE:
        only = unseen[0]
        rest = only.growth * (1 - seen) + only.bytes_gained
        others = [grower for grower in growers if grower is not only]
        return [*others, only._replace(bytes_gained=rest)]
    return [grower._replace(foreign="", is_partial=False) for grower in growers]
