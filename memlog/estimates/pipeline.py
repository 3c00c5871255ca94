"""Ranks of a pipeline, one after the other: each stage has layers, and so memory, of its own.

Before the first step, each stage asks its neighbours for the shapes of its inputs and gradients. If the
answer does not exist yet, the rank's run ends there, and begins again after the neighbour has run.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage

from memlog.errors import ConfigurationError

_Found = TypeVar("_Found")


class _AnswerMissing(BaseException):
    """A rank needs an answer of another one, which has not run so far. No ``except Exception`` catches it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def found_by_rank(find: Callable[[int], _Found]) -> dict[int, _Found]:
    """Return what ``find`` finds for the first rank, and for the ranks of its pipeline's other stages.

    ``find`` gets a rank, and runs the program as this rank.

    Raises:
        ConfigurationError: The stages wait for each other, or their order can't be followed.
    """
    messages = _Messages()
    found: dict[int, _Found] = {}
    known = [0]
    while waiting := [rank for rank in known if rank not in found]:
        before = len(known), len(found), messages.count()
        for rank in waiting if len(known) % 2 else reversed(waiting):
            with messages.of(rank):
                asked = _run(find, rank, found)
            if asked is not None and asked not in known:
                known.append(asked)
        if before == (len(known), len(found), messages.count()):
            raise ConfigurationError(
                "the stages of the pipeline wait for each other in an order that an estimate can't follow: "
                "estimate each stage as a model of its own"
            )
    return dict(sorted(found.items()))


def _run(find: Callable[[int], _Found], rank: int, found: dict[int, _Found]) -> int | None:
    """Run a rank, to its end or to an answer that is missing. Return the rank whose answer this is."""
    try:
        found[rank] = find(rank)
    except _AnswerMissing as missing:
        return missing.rank
    return None


class _Messages:
    """Messages between the ranks of a pipeline."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)

    def count(self) -> int:
        return sum(map(len, self._sent.values()))

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Inside the block, the program is ``rank``: it sends its messages anew, and reads the others'."""
        for route in [each for each in self._sent if each[0] == rank]:
            del self._sent[route]
        read: defaultdict[int, int] = defaultdict(int)

        def send(objects: list[Any], dst: int, **_: Any) -> None:
            self._sent[rank, dst] += copy.deepcopy(objects)

        def receive(objects: list[Any], src: int, **_: Any) -> None:
            sent = self._sent[src, rank]
            for place in range(len(objects)):
                if read[src] >= len(sent):
                    raise _AnswerMissing(src)
                objects[place] = copy.deepcopy(sent[read[src]])
                read[src] += 1

        with ExitStack() as undo:
            undo.enter_context(patch.object(dist, "send_object_list", send))
            undo.enter_context(patch.object(dist, "recv_object_list", receive))
            # The stages vote on whether each of them knows its shapes. They always ask here: a vote that is
            # received has no value in an estimate.
            for vote in ("_warmup_forward_vote", "_warmup_backward_result"):  # older torch has none
                undo.enter_context(patch.object(PipelineStage, vote, _no_vote, create=True))
            # A schedule saves the states of the device's generators, which an estimate does not have.
            undo.enter_context(patch.object(torch.random, "fork_rng", lambda **_: nullcontext()))
            yield


def _no_vote(*_: Any, **__: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        return torch.zeros(1, dtype=torch.int32)
