"""Finding about a first checkpoint that takes more memory than the host has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from memlog._internal.units import format_bytes
from memlog.events import Event, Finding, Phase, Sample, SavedState, SavingWay, now_us
from memlog.facts.saving import SAVING_CALLS, SavingCost, saving_costs

KIND: Final = "first_checkpoint"
SAVES: Final = "checkpoint"
"""Phase in which a trainer saves."""
_SAMPLES: Final = 3
"""Number of samples in a row with too little free memory. Loading of data can fill memory for a moment."""
_SMALL_FILE: Final = 10**9
"""Bytes of the files that the remedy for Transformers' Trainer makes."""
_REMEDIES: Final[dict[SavingWay, str]] = {
    "lightning": (
        "Lightning copies the checkpoint to a buffer before it writes. Pass Trainer(plugins=[…]) a subclass "
        "of TorchCheckpointIO whose save_checkpoint calls torch.save(checkpoint, path): that takes {file}."
    ),
    "transformers_trainer": (
        "The Trainer copies the weights of a whole file to the host. Smaller files take less: "
        "model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size='1GB') before "
        "trainer.train()."
    ),
}


class FirstCheckpoint:
    """Subscriber that publishes a finding if it is known how the trainer will save, and this does not fit.

    ``publish`` is called with the finding. ``free`` returns the bytes that the training process can still
    take on the host; ``None``: unknown.
    """

    def __init__(self, publish: Callable[[Event], object], free: Callable[[], int | None]) -> None:
        self._publish = publish
        self._free = free
        self._state: SavedState | None = None
        self._cost: SavingCost | None = None
        self._short = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, SavedState):
            known = [cost for cost in saving_costs(event) if cost.way == event.way]
            self._state, self._cost, self._short = event, next(iter(known), None), 0
        elif isinstance(event, Phase):
            if event.label == SAVES:
                self._cost = None
        elif isinstance(event, Sample) and self._state is not None and self._cost is not None:
            free = self._free()
            self._short = self._short + 1 if free is not None and free < self._cost.host else 0
            if free is not None and self._short == _SAMPLES:
                self._publish(_finding(self._state, self._cost, free, event.step))
                self._cost = None


def _finding(state: SavedState, cost: SavingCost, free: int, step: int | None) -> Finding:
    at = "" if state.first_at is None else f" at step {state.first_at:,}"
    model, optimizer = (
        format_bytes(each.host + each.device) for each in (state.model, state.optimizer)
    )
    return Finding(
        time_us=now_us(),
        step=step,
        kind=KIND,
        title=(
            f"The first checkpoint{at} needs {format_bytes(cost.host)} of host memory; "
            f"{format_bytes(free)} are free"
        ),
        where=SAVES,
        since_step=None,
        rate=None,
        forecast=None,
        limit=None,
        evidence=(
            f"{SAVING_CALLS[cost.way]} saves {model} of the model and {optimizer} of the optimizer's state. "
            "What this takes follows from the sizes of the tensors.",
            f"The process could take {format_bytes(free)} more of its container or machine.",
        ),
        confidence="high",
        remedy=_remedy(state, cost),
    )


def _remedy(state: SavedState, cost: SavingCost) -> str | None:
    """Return what the program can do that it does not do yet; ``None``: nothing is known."""
    remedy = _REMEDIES.get(cost.way)
    smaller = {each.way: each for each in saving_costs(replace(state, shard=_SMALL_FILE))}
    if remedy is None or (
        cost.way == "transformers_trainer" and smaller[cost.way].host >= cost.host
    ):
        return None
    remedy = remedy.format(file=format_bytes(smaller["torch_save"].host_most))
    if cost.way == "lightning" and state.optimizer.host + state.optimizer.device:
        remedy += " ModelCheckpoint(save_weights_only=True) saves less."
    return remedy
