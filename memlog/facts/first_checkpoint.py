"""Memory that saving a checkpoint takes, and the finding about a first checkpoint that does not fit.

The rules follow from the sources of torch 2.13, safetensors 0.8, Transformers 5 and Lightning 2.6, and are
compared with real saves (docs/saving.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from memlog._internal.terminal import format_bytes
from memlog.events import Event, Finding, Phase, Sample, SavedState, SavingWay, now_us

SAVING_CALLS: Final[dict[SavingWay, str]] = {
    "state_dict": "state_dict()",
    "deepcopy": "copy.deepcopy(state_dict())",
    "cpu_copies": "state_dict() with .cpu()",
    "torch_save": "torch.save to a file",
    "torch_save_buffer": "torch.save to a BytesIO",
    "dcp_save": "dcp.save",
    "dcp_async_save": "dcp.async_save",
    "full_state_dict": "get_state_dict(full_state_dict, cpu_offload)",
    "full_state_dict_on_device": "get_state_dict(full_state_dict)",
    "save_pretrained": "save_pretrained (Transformers; the model alone)",
    "transformers_trainer": "Trainer (Transformers)",
    "lightning": "Trainer (Lightning)",
}
"""Each way as a few words, such as the call that a program makes."""
_MOVED: Final = 64 * 2**20
"""Bytes that the GNU C library may keep of a buffer that it has moved, as long as the buffer was small: twice
the size from which it maps memory."""
_GLOO_THREADS: Final = 2
"""Threads of a process group of Gloo. The C library keeps freed memory for each thread."""
_MOSTLY: Final = 0.95
"""Share of the bytes. If other processes have no part of them, the other bytes don't matter."""


class SavingCost(msgspec.Struct, frozen=True):
    """Peak of the memory that one way of saving takes in this process, in addition to the training's own.

    Attributes:
        way: The way, a key of `SAVING_CALLS`.
        host: Bytes of the host's memory.
        device: Bytes of the device's memory.
        host_most: Bytes of the host's memory if the C library keeps all that it may keep of freed copies of
            tensors below 32 MiB, of a growing buffer, and of the threads that gather whole tensors. How
            much it keeps is chance.
    """

    way: SavingWay
    host: int
    device: int
    host_most: int


def saving_costs(state: SavedState) -> tuple[SavingCost, ...]:
    """Return the cost of each way of saving model and optimizer whose cost is known.

    Of several ranks, this is the one that saves.
    """
    return tuple(_costs(state))


def _costs(state: SavedState) -> Iterator[SavingCost]:
    model, optimizer = state.model, state.optimizer
    host, device = model.host + optimizer.host, model.device + optimizer.device
    copied = model.copied + optimizer.copied
    largest = max(model.largest, optimizer.largest)
    buffered = max(model.buffered, model.host + model.device + optimizer.buffered)
    small = model.small + optimizer.small
    buffered_most = buffered + small + min(_MOVED, buffered)
    gathered = max(model.gathered, optimizer.gathered)
    whole = model.whole + optimizer.whole
    on_host = max(model.gathered_on_host, model.whole_on_host + optimizer.gathered_on_host)
    kept = min(_GLOO_THREADS * _MOVED, model.whole_on_host + optimizer.whole_on_host)
    yield _cost("state_dict", 0)
    yield _cost("deepcopy", host, device=device)
    yield _cost("cpu_copies", device)
    yield _cost("torch_save", largest, most=min(largest + small, device))
    yield _cost("torch_save_buffer", buffered, most=buffered_most)
    # Replicated tensors are divided among the ranks in a way that this process does not know.
    alone = state.ranks == 1 or model.sharded + optimizer.sharded >= _MOSTLY * (host + device)
    if alone and (state.dcp_keeps_copies or not device):
        yield _cost("dcp_save", copied if state.dcp_keeps_copies else 0)
    yield _cost("dcp_async_save", host + device)
    full = on_host + whole + model.undivided + optimizer.undivided
    yield _cost("full_state_dict", full, device=gathered, most=full + kept)
    yield _cost("full_state_dict_on_device", on_host, device=whole, most=on_host + kept)
    if gathered or on_host:
        return  # Transformers and Lightning save distributed tensors in several other ways
    weights = model.buffered if state.safetensors_copies else model.device
    weights = min(weights, max(state.shard, model.largest))
    yield _cost("save_pretrained", weights)
    most = min(optimizer.largest + optimizer.small, optimizer.device)
    saved = max(weights, optimizer.largest)
    yield _cost("transformers_trainer", saved, most=max(weights, most))
    yield _cost("lightning", buffered, most=buffered_most)


def _cost(way: SavingWay, host: int, *, device: int = 0, most: int | None = None) -> SavingCost:
    return SavingCost(way, host, device, host if most is None else most)


def saving_rows(costs: Iterable[SavingCost]) -> list[tuple[str, str, str]]:
    """Return each way with the memory that it takes on host and device; the cheapest for the host first."""
    return [
        (SAVING_CALLS[cost.way], _range(cost.host, cost.host_most), format_bytes(cost.device))
        for cost in sorted(costs, key=lambda cost: (cost.host, cost.device))
    ]


def _range(low: int, high: int) -> str:
    low_text, high_text = format_bytes(low), format_bytes(high)
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


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
