"""`memlog.estimate`: the memory of a training step, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from torch import nn
from torch.optim import Optimizer

from memlog._internal.terminal import MIB, format_bytes
from memlog._internal.text_parser import read_size
from memlog.errors import ConfigurationError
from memlog.estimates.caching_allocator import CachingAllocator
from memlog.estimates.device_memory import (
    CONTEXT,
    NO_BACKWARD,
    NO_STEP,
    Replay,
    SizeRange,
    TracedTraining,
    in_short,
)
from memlog.estimates.fake_mode import FakeMode
from memlog.estimates.fake_step import only_new_objects, reasons
from memlog.estimates.fakes import any_initial_values, one_of, real_indices
from memlog.estimates.gpus import chosen
from memlog.estimates.places import Places, all_on_cpu
from memlog.estimates.plan import NO_CHANGES, StepChanges, plan, refuse_plan
from memlog.estimates.question import Question
from memlog.facts.later_memory import SavingCost, saving_costs
from memlog.torchside.compiled_code import planned_by_inductor
from memlog.trace import exporters
from memlog.trace.accounting import PhaseLevel, PhaseName, phase_levels
from memlog.trace.predict import Advice, advise
from memlog.trace.predict.fitting import FittingPlan
from memlog.trace.records import LayerFigures, RecordedTrace
from memlog.tracer.engines.operation_recorder import ALWAYS

MARGIN = 0.02
"""Safety margin, as a fraction of the estimate. `make estimate-bench` shows how often it is too small."""

_ROUNDING = "rounding"
"""Category of the bytes by which the allocator's blocks are larger than the tensors in them."""

_HUGE = 2**31
"""Batch size limit of `Estimate.largest_batch`. If memlog has to try a larger batch, it raises an error,
because the step seems to ignore the batch size."""


class Estimate:
    """Memory of a training's steps. Sizes are bytes.

    On the CPU, it is the memory of one step if the optimizer's state exists before the step. On a CUDA
    device, it is the memory of the set-up, of the first step, and of later steps.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        ranks: Number of processes of the training, of which this is the first; ``None``: `estimate` did not
            get it.
        gpu: Name of the GPU for which the buffers inside operations were computed; ``None`` on the CPU.
        batch: Number of samples; ``None`` if `estimate` did not get it.
        length: Length of a sequence; ``None`` if `estimate` did not get it.
        peak: Maximum number of bytes that tensors take at the same time. On a CUDA device, it includes
            cuBLAS's workspaces and the rounding of sizes, as ``torch.cuda.max_memory_allocated`` does.
        on_host: Maximum number of bytes that the program's tensors take on the host at the same time, such
            as a dataset, offloaded activations and outputs. They are not in ``peak``. 0 on the CPU.
        categories: Bytes at the peak, by category (parameters, gradients, activations, …).
        layers: Figures of every layer.
        saving: Memory that each way of saving a checkpoint takes in addition, at its peak. Empty if the step
            has neither model nor optimizer.
        recording: The trace of the step with the highest peak, which memlog's exporters read.
        peak_by_rank: ``peak`` of each stage of a pipeline, by its rank; empty if there is no pipeline.
    """

    def __init__(self, question: Question, mode: FakeMode | None = None) -> None:
        self._question = question
        self.device = question.device
        self.gpu = question.gpu.name if question.device == "cuda" else None
        self.ranks = question.ranks
        self.peak_by_rank: dict[int, int] = {}
        self.batch = question.size
        self.length = question.length
        traced, to_save, self._trains = question.trace(mode)
        self.on_host = traced.on_host if isinstance(traced, TracedTraining) else 0
        self._replay = Replay(traced) if isinstance(traced, TracedTraining) else None
        # If both peaks are equal, `max` returns the later step, which stands for most steps.
        self.recording: RecordedTrace = (
            max(traced.later, traced.first, key=_peak)
            if isinstance(traced, TracedTraining)
            else traced
        )
        result = self.recording.result
        self.peak: int = result.peak or 0
        self.categories: dict[str, int] = result.categories
        self.layers: tuple[LayerFigures, ...] = result.layers
        self.saving: tuple[SavingCost, ...] = () if to_save is None else saving_costs(to_save)
        self._allocator = CachingAllocator(expandable=question.expandable_segments)
        if self._replay is not None:
            self._replay.on(self._allocator)
            rounding = self._allocator.most_allocated - self.peak
            self.peak += rounding
            self.categories = {**self.categories, _ROUNDING: rounding}

    @property
    def phases(self) -> dict[PhaseName, PhaseLevel]:
        """Live bytes at the end of each phase of the step, and the highest live bytes in the phase."""
        return phase_levels(self.recording) or {}

    @property
    def reserved(self) -> int | None:
        """Bytes that CUDA's caching allocator reserves in the first steps; ``None`` on the CPU."""
        return None if self._replay is None else self._allocator.most_reserved

    @property
    def besides(self) -> tuple[SizeRange, ...]:
        """Ranges of the device memory that CUDA's context needs; empty on the CPU."""
        return (CONTEXT,) if self.device == "cuda" else ()

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Sentences about memory that the estimate leaves out, or counts in another way.

        Most estimates have none. If there are any, the step may need more than the peak and the margin.
        """
        result = self.recording.result
        sentences = [sentence for sentence in result.unseen if sentence not in ALWAYS]
        if result.exactness == "exact":
            sentences = []
        besides = (
            () if self._replay is None else self._replay.uncounted(sentences, self._question.ranks)
        )
        return (*sentences, *besides, *self._left_out())

    def _left_out(self) -> Iterator[str]:
        """Return sentences about parts of a training step that the step does not run.

        A step without an optimizer is not meant to train, such as an evaluation.
        """
        if not self._trains:
            return
        if not any(layer.phase("backward") for layer in self.recording.result.layers):
            yield NO_BACKWARD
        if not self.recording.optimizers:
            yield NO_STEP

    @property
    def without(self) -> str:
        """What `peak`, `needed` and `fits` do not count, in a few words, as `uncounted` names it.

        Empty if they count everything. If it is not empty, a step that fits may still run out of memory.
        """
        return "; ".join(in_short(self.uncounted))

    @property
    def needed(self) -> int:
        """Bytes of memory that should be enough for the step.

        They are the sum of the reserved bytes (on the CPU, the peak), the safety margin, and the upper ends
        of the ranges in `besides`.

        A smaller device can be enough, because the allocator gives back unused bytes when it reaches the
        limit. `fits` considers this.
        """
        held = self.peak if self.reserved is None else self.reserved
        return round(held * (1 + MARGIN)) + _most(self.besides)

    def fits(self, memory: str | int) -> bool:
        """Return whether the step fits into a device's memory, with the safety margin.

        True does not include what `without` names, nor on the CPU the process's own memory. Keep room for
        that.

        Args:
            memory: Bytes, or text such as ``"80 GiB"``. A device has a little less than its name says: see
                nvidia-smi.

        Raises:
            ConfigurationError: ``memory`` is a text that can't be read.
        """
        limit = read_size(memory)
        if self._replay is None:
            return self.needed <= limit
        for_tensors = int((limit - _most(self.besides)) / (1 + MARGIN))
        expandable = self._question.expandable_segments
        return self._replay.on(CachingAllocator(for_tensors, expandable=expandable))

    def with_batch(self, batch: int) -> Estimate:
        """Estimate the same step with another batch size.

        Raises:
            ConfigurationError: `estimate` got no batch.
        """
        return Estimate(self._question.with_batch(batch))

    def with_length(self, length: int) -> Estimate:
        """Estimate the same step with sequences of another length.

        Raises:
            ConfigurationError: `estimate` got no length.
        """
        return Estimate(self._question.with_length(length))

    def largest_batch(self, memory: str | int) -> int:
        """Return the largest batch size that fits, by estimates of several sizes; 0 if none fits.

        Args:
            memory: As for `fits`.

        Raises:
            ConfigurationError: `estimate` got no batch, the step ignores the batch size, or ``memory``
                is a text that can't be read.
        """
        limit = read_size(memory)
        size, tried = self._question.known_size(), self
        needed: dict[int, int] = {}
        fitting = too_large = 0
        while True:
            needed[size] = tried.needed
            if tried.fits(limit):
                fitting = size
            else:
                too_large = size
            if too_large and too_large - fitting <= 1:
                return fitting
            if size > _HUGE:
                raise ConfigurationError(
                    f"a batch of {size:,} needs no more memory than a small one, so the step seems to ignore "
                    "the batch size: make the inputs in the step from its argument `batch`"
                )
            size = _next_size(needed, limit, fitting, too_large)
            tried = self.with_batch(size)

    def plan(self, memory: str | int) -> FittingPlan:
        """Return the cheapest changes with which the step fits, all estimated together.

        They are parts of the batch with accumulated gradients, checkpointed modules, autocast, an optimizer
        with ``foreach=False``, activations that wait on the host, Adafactor as the optimizer, and with
        several ``ranks`` a model that is sharded (``fully_shard``) if the step does not distribute it itself.
        To be sharded, the model must be given as a function. Each combination that is tried takes as long as
        an estimate; there are up to some twenty.

        Args:
            memory: As for `fits`.

        Raises:
            ConfigurationError: The estimate is for the CPU, or ``memory`` is a text that can't be read.
        """
        refuse_plan(self.device)
        whole = self._question

        def estimated(changes: StepChanges) -> Estimate:
            part = (
                whole
                if changes.parts == 1
                else whole.with_batch(whole.known_size() // changes.parts)
            )
            return Estimate(replace(part, changes=changes))

        return plan(estimated, read_size(memory))

    @property
    def advice(self) -> Advice:
        """Changes that would lower the peak, each with the bytes saved, as `memlog advise` shows for a run.

        The time that a change adds is unknown, because nothing was computed. There is no advice for one of
        several ranks: its buffers for communication would change, too.
        """
        advice = advise(self.recording)
        if self.ranks is not None and self.ranks > 1:
            return msgspec.structs.replace(advice, hints=())
        hints = tuple(msgspec.structs.replace(hint, time=None) for hint in advice.hints)
        return msgspec.structs.replace(advice, hints=hints)

    def export_flame_graph(self, output_path: str | PathLike[str]) -> Path:
        """Write a flame graph of the bytes at the peak for https://www.speedscope.app."""
        return exporters.write_json(exporters.flame_graph(self.recording), output_path)

    def text(self) -> str:
        """Return the estimate as lines of text."""
        on = "" if self.gpu is None else f" on the GPU {self.gpu}"
        rows = [(f"peak of all tensors{on}", format_bytes(self.peak))]
        rows += [(f"  {name}", format_bytes(size)) for name, size in self.categories.items()]
        if self.on_host >= MIB:
            rows.append(("tensors on the host, not in the peak", format_bytes(self.on_host)))
        if self.reserved is not None:
            rows.append(("reserved by the allocator", format_bytes(self.reserved)))
        for size_range in self.besides:
            rows.append(
                (
                    size_range.what,
                    f"{format_bytes(size_range.low)} to {format_bytes(size_range.high)}",
                )
            )
        needed = f"needed, with a margin of {MARGIN * 100:.0f} %"
        rows.append((needed, format_bytes(self.needed) + _but(self.without)))
        width = max(len(name) for name, _size in rows)
        lines = [f"{name:<{width}}  {size}" for name, size in rows]
        return "\n".join([*lines, *(f"Warning: {sentence}" for sentence in self.uncounted)])

    def __repr__(self) -> str:
        of = "" if self.batch is None else f", batch {self.batch}"
        return (
            f"<memlog.Estimate: peak {format_bytes(self.peak)} on {self.device}{of}, "
            f"needs {format_bytes(self.needed)}{_but(self.without)}>"
        )

    def _repr_html_(self) -> str:
        """Return the report of the traced step, for notebooks."""
        from memlog.reports.notebook import trace_html  # noqa: PLC0415 - only notebooks need it

        return trace_html(self.recording)


def _but(without: str) -> str:
    return without and f", not counting {without}"


def _peak(trace: RecordedTrace) -> int:
    return trace.result.peak or 0


def _most(ranges: Iterable[SizeRange]) -> int:
    return sum(size_range.high for size_range in ranges)


def _next_size(needed: dict[int, int], limit: int, fitting: int, too_large: int) -> int:
    """Return the batch size to try next.

    The size usually comes from a straight line through the two estimates that are nearest to the limit.
    """
    near = sorted(needed, key=lambda size: abs(needed[size] - limit))[:2]
    first, last = near[0], near[-1]
    slope = 0.0 if first == last else (needed[first] - needed[last]) / (first - last)
    if slope > 0:
        guess = first + int((limit - needed[first]) / slope)
    elif too_large:
        guess = (fitting + too_large) // 2
    else:
        # If two sizes need the same memory, both are too small to make a difference. The next one is much
        # larger.
        guess = max(needed) * (2 if len(needed) == 1 else 16)
    highest = too_large - 1 if too_large else max(guess, fitting + 1)
    return min(max(guess, fitting + 1), highest)


def estimate(
    step: Callable[..., object],
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[Any], Any] | None = None,
    batch: Any = None,
    length: int | None = None,
    device: str = "cuda",
    expandable_segments: bool = False,
    ranks: int | None = None,
) -> Estimate:
    """Estimate the memory of a training step without computing it, and without a GPU.

    ::

        def step(model, optimizer, batch):
            tokens = torch.randint(50257, (batch, 1024))
            model(tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        result = memlog.estimate(step, model=model, optimizer=torch.optim.AdamW, batch=8)
        result.peak, result.fits("80 GiB"), result.largest_batch("80 GiB")

    The step runs twice on fake tensors, which have shapes but no bytes. The first run makes the optimizer's
    state. The second run is traced. Afterwards, the model and the optimizer get their own tensors back.

    Args:
        step: Function that makes one training step: forward, backward, and the optimizer's step. Its
            parameters can be ``model``, ``optimizer``, ``batch`` and ``length``. The step may use autocast,
            checkpointing and accumulation. The step may print the number ``loss.item()`` and calculate with
            the number, but must not branch on a tensor's value. Other effects of the step, such as a
            scheduler's step and printing, really happen.
        model: The model, which can be on the device ``meta``, or a function that makes it. If ``model`` is a
            function, the parameters take no memory. ``None``: the first module that the step calls.
        optimizer: The optimizer, a list of optimizers, or a function that makes them from the parameters,
            such as ``torch.optim.AdamW``.
        batch: A number of samples, or a batch: nested tensors whose first dimension counts the samples.
        length: Length of a sequence.
        device: Where the step will run: ``"cuda"``, ``"cpu"``, or the name of a GPU, such as ``"H100"``. The
            GPU decides the sizes of buffers inside operations. ``"cuda"`` stands for this machine's GPU, or
            for an A100 if this machine has none.
        expandable_segments: True if CUDA's allocator is configured with ``expandable_segments:True``.
        ranks: Number of processes, each with a device. The estimate is of the first rank, which has the
            largest parts if a tensor can't be divided evenly. The process group is torch's fake one, so
            pass ``model`` as a function that makes the mesh and calls ``fully_shard``, ``parallelize_module``
            or ``DistributedDataParallel``. ``None``: one process.

    Raises:
        ConfigurationError: An argument is invalid, or the memory can't be known; the message says why.
    """
    kind, gpu = chosen(device)
    question = Question(
        step=step,
        model=model,
        optimizer=optimizer,
        batch=batch,
        length=length,
        device=kind,
        gpu=gpu,
        expandable_segments=expandable_segments,
        ranks=ranks,
    )
    return Estimate(question)


@only_new_objects()
def estimate_made_by(
    make: Callable[[], Mapping[str, Any]],
    *,
    batch: int | None = None,
    length: int | None = None,
    device: str = "cuda",
    ranks: int | None = None,
    changes: StepChanges = NO_CHANGES,
) -> Estimate:
    """Estimate the step that the function ``make`` returns. Tensors that ``make`` creates are fake.

    ``make`` returns a dictionary of arguments of `estimate`: ``step``, and if needed ``model``, ``optimizer``
    and ``expandable_segments``. ``batch``, ``length``, ``device`` and ``ranks`` are as for `estimate`. If
    ``make`` makes a stage of a pipeline, each stage is estimated, and the one that needs most is returned.

    Raises:
        ConfigurationError: As in `estimate`, or the result of ``make`` has an unknown key.
    """
    kind, gpu = chosen(device)

    def of_rank(rank: int) -> Estimate:
        mode = FakeMode(Places() if kind == "cuda" else None)
        with one_of(ranks, mode, rank):
            planned = planned_by_inductor(on_cuda=kind == "cuda")
            with (
                planned,
                reasons(),
                mode,
                all_on_cpu(mode.places),
                real_indices(),
                any_initial_values(),
            ):
                made = make()
            unknown = made.keys() - {"step", "model", "optimizer", "expandable_segments"}
            if unknown:
                raise ConfigurationError(
                    f"the dictionary has the key {min(unknown)!r}: its keys may be step, model, optimizer "
                    "and expandable_segments"
                )
            question = Question(
                **made,
                batch=batch,
                length=length,
                device=kind,
                gpu=gpu,
                ranks=ranks,
                changes=changes,
            )
            return Estimate(question, mode)

    if ranks is None:
        return of_rank(0)
    from memlog.estimates.ranks import found_by_rank  # noqa: PLC0415 - it loads torch.distributed

    by_rank = found_by_rank(of_rank)
    most = max(by_rank.values(), key=lambda stage: stage.needed)
    if len(by_rank) > 1:
        most.peak_by_rank = {rank: stage.peak for rank, stage in by_rank.items()}
    return most
