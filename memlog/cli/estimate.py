"""``memlog estimate``: estimate a training step's memory, and tell whether it fits on a device."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console

from memlog._internal.terminal import format_bytes, lines
from memlog._internal.text_parser import read_size
from memlog.cli import SETTINGS
from memlog.cli.advise import print_hints
from memlog.cli.output import json_option, page, plain, print_json, saving_table, table
from memlog.errors import ConfigurationError, MemlogError, MissingExtraError
from memlog.facts.later_memory import SavingCost
from memlog.reports import encode
from memlog.sink import is_installed
from memlog.trace.predict.fitting import FittingPlan

if TYPE_CHECKING:
    from memlog.estimates import Estimate
    from memlog.estimates.plan import StepChanges

SCHEMA = 1


class EstimatedStep(msgspec.Struct, frozen=True):
    """Row for one batch size and length. Sizes are bytes."""

    batch: int | None
    """The batch size; ``None``: not given."""
    length: int | None
    """The sequence length; ``None``: not given."""
    peak: int
    """Peak of the tensors; on a CUDA device, of the allocator's blocks."""
    categories: dict[str, int]
    """Bytes at the peak by category."""
    reserved: int | None
    """Bytes that the allocator reserves; ``None`` on the CPU."""
    needed: int
    """Bytes that the step needs: with a margin, and on a CUDA device with the context, on the CPU with the
    process's own memory."""
    fits: bool | None
    """True if ``needed`` fits into ``memory``; ``None``: no memory was given."""
    uncounted: tuple[str, ...]
    """Sentences about memory that the figures leave out; empty if the figures are complete."""
    without: str
    """What ``uncounted`` is about, in a few words. If it is not empty, ``fits`` does not count it."""
    peak_by_rank: dict[int, int] = {}
    """Peak of each stage of a pipeline, by its rank; empty if there is no pipeline. The other figures are
    those of the rank that needs most."""


class EstimateDocument(msgspec.Struct, frozen=True):
    schema: int
    """Version of this document."""
    target: str
    """Script and function."""
    device: str
    """The GPU, or ``cpu``."""
    ranks: int | None
    """Number of processes of the training, of which the first, or a pipeline's stage that needs most, is
    estimated; ``None``: not given."""
    memory: int | None
    """The memory of ``--device``; ``None``: not given."""
    steps: tuple[EstimatedStep, ...]
    """One for each batch size and length."""
    saving: tuple[SavingCost, ...] = ()
    """Memory that each way of saving a checkpoint takes in addition. Empty if model and optimizer are
    unknown."""
    process: int | None = None
    """On the CPU, the process's own memory (Python, torch and the script's libraries), which is measured and
    part of ``needed``; ``None`` on a CUDA device."""


class PlanDocument(msgspec.Struct, frozen=True):
    schema: int
    """Version of this document."""
    target: str
    """Script and function."""
    plan: FittingPlan
    """The changes with which the step fits."""


@click.command(
    "estimate",
    context_settings=SETTINGS,
    short_help="Estimate a training step's memory, without a GPU.",
)
@click.argument("target", metavar="SCRIPT.PY:FUNCTION")
@click.option("--batch", "batches", metavar="8,16,32", help="Batch sizes, separated by commas.")
@click.option(
    "--length", "lengths", metavar="512,1024", help="Sequence lengths, separated by commas."
)
@click.option(
    "--device",
    "memory",
    metavar="SIZE",
    help='The device\'s memory, such as "80 GiB"; or "cuda", "cpu" or a GPU, as in memlog.estimate.',
)
@click.option(
    "--cpu", is_flag=True, help="Estimate a step on the CPU; by default on a CUDA device."
)
@click.option(
    "--gpu",
    metavar="H100",
    help="The GPU, on which sizes of workspaces depend; by default this machine's, or an A100.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    metavar="8",
    help="Number of processes that train together, each on one device; the first is estimated.",
)
@click.option(
    "--fit",
    metavar="SIZE",
    help='Print the cheapest changes with which the step fits into "24 GiB", and the code for them.',
)
@json_option
def estimate_step(
    target: str,
    *,
    batches: str | None,
    lengths: str | None,
    memory: str | None,
    cpu: bool,
    gpu: str | None,
    ranks: int | None,
    fit: str | None,
    as_json: bool,
) -> None:
    """Estimate the memory of a training step, without computing it and without a GPU.

    FUNCTION in SCRIPT.PY gets a batch size (and a length, if it has a second argument), and returns the
    arguments of memlog.estimate as a dictionary: step, model, optimizer. It makes the model on fake tensors,
    which take no memory. docs/estimates.md has an example.

    Exit code 1 if --device is given and no row fits, or if nothing fits into --fit.
    """
    limit, named = _memory_or_device(memory)
    device = "cpu" if cpu else gpu or named or "cuda"
    if fit is not None:
        _plan(target, batches, lengths, device, ranks, read_size(fit), as_json=as_json)
        return
    function = _function(target)
    estimates = [
        _estimated(function, batch, length, device, ranks)
        for batch, length in product(_numbers("--batch", batches), _numbers("--length", lengths))
    ]
    own = _own_memory() if estimates[0].device == "cpu" else 0
    document = EstimateDocument(
        SCHEMA,
        target,
        estimates[0].gpu or estimates[0].device,
        ranks,
        limit,
        tuple(_row(estimated, limit, own) for estimated in estimates),
        estimates[-1].saving,
        own or None,
    )
    if as_json:
        print_json(encode(document))
    else:
        _print(document, estimates)
    if limit is not None and not any(step.fits for step in document.steps):
        click.get_current_context().exit(1)


def _plan(
    target: str,
    batches: str | None,
    lengths: str | None,
    device: str,
    ranks: int | None,
    memory: int,
    *,
    as_json: bool,
) -> None:
    [batch, *more], [length, *others] = _numbers("--batch", batches), _numbers("--length", lengths)
    if more or others:
        raise ConfigurationError("--fit plans one step: write one batch size and one length")
    _need_torch()
    from memlog.estimates.plan import (  # noqa: PLC0415
        NO_CHANGES,
        plan,
        refuse_plan,
    )

    refuse_plan(device)
    function = _function(target)

    def estimated(changes: StepChanges) -> Estimate:
        part = batch and batch // changes.parts
        made = None if changes == NO_CHANGES else changes
        return _estimated(function, part, length, device, ranks, made)

    fitting = plan(estimated, memory)
    if as_json:
        print_json(encode(PlanDocument(SCHEMA, target, fitting)))
    else:
        click.echo(fitting.text())
        if fitting.code:
            click.echo(f"\n{fitting.code}")
    if not fitting.fits:
        click.get_current_context().exit(1)


def _memory_or_device(text: str | None) -> tuple[int | None, str | None]:
    """Return the bytes, or the name of a device, that ``--device`` gives."""
    if text is None or not text[:1].isalpha():
        return (None if text is None else read_size(text)), None
    return None, text


def _numbers(option: str, text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(f"{option} {text!r}: write whole numbers above 0, such as 8,16,32")
    return [int(part) for part in parts]


def _function(target: str) -> Callable[..., Any]:
    script, colon, name = target.rpartition(":")
    if not colon or not Path(script).is_file():
        raise ConfigurationError(
            f"{target!r}: write the script and its function, such as train.py:job"
        )
    path = Path(script).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{script!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    sys.modules[path.stem] = module
    with _own_exit_code():
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{script} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _estimated(
    function: Callable[..., Any],
    batch: int | None,
    length: int | None,
    device: str,
    ranks: int | None,
    changes: StepChanges | None = None,
) -> Estimate:
    _need_torch()
    from memlog.estimates.estimate import estimate_made_by  # noqa: PLC0415 - needs torch

    arguments = [] if batch is None else [batch]
    named = {}
    if length is not None:
        if batch is None:
            named["length"] = length
        else:
            arguments.append(length)
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"the function {function.__name__}{inspect.signature(function)} does not take the "
            f"arguments that --batch and --length give ({error})"
        ) from None

    def make() -> Mapping[str, Any]:
        made = function(*arguments, **named)
        if not isinstance(made, Mapping) or "step" not in made:
            raise ConfigurationError(
                'the function returns no dictionary with a "step": return the arguments of '
                'memlog.estimate, such as {"step": step, "model": model, "optimizer": optimizer}'
            )
        return made

    asked = functools.partial(
        estimate_made_by, make, batch=batch, length=length, device=device, ranks=ranks
    )
    if changes is not None:
        return asked(changes=changes)  # a plan leaves changes out with which the script fails
    with _own_exit_code():
        return asked()


def _need_torch() -> None:
    if not is_installed("torch"):
        raise MissingExtraError(
            "an estimate needs torch, which is not installed: pip install torch"
        )


@contextmanager
def _own_exit_code() -> Iterator[None]:
    """Turn an error of the script into exit code 2 and a traceback. Exit code 1 means that no row fits."""
    try:
        yield
    except MemlogError:
        raise
    except Exception as error:
        click.echo(lines(traceback.format_exc()), err=True)
        raise ConfigurationError(
            f"the script failed, so nothing was estimated: {type(error).__name__}: {error}"
        ) from error


def _own_memory() -> int:
    """Return this process's resident bytes.

    After an estimate, it has loaded what a training loads, such as the modules that torch's optimizers need.
    """
    import psutil  # noqa: PLC0415 - only this command needs it

    return int(psutil.Process().memory_info().rss)


def _row(found: Estimate, limit: int | None, own: int) -> EstimatedStep:
    return EstimatedStep(
        batch=found.batch,
        length=found.length,
        peak=found.peak,
        categories=found.categories,
        reserved=found.reserved,
        needed=found.needed + own,
        fits=None if limit is None else found.fits(limit - own),
        uncounted=found.uncounted,
        without=found.without,
        peak_by_rank=found.peak_by_rank,
    )


def _print(document: EstimateDocument, found: list[Estimate]) -> None:
    with page() as console:
        counted = [
            name
            for name in ("batch", "length")
            if any(getattr(step, name) is not None for step in document.steps)
        ]
        columns = (*counted, "peak of tensors", "reserved", "needed")
        rows = table(console, *columns, right=columns)
        if document.memory is not None:
            rows.add_column(f"fits {format_bytes(document.memory)}")
        for step in document.steps:
            counts = (f"{getattr(step, name):,}" for name in counted)
            reserved = "" if step.reserved is None else format_bytes(step.reserved)
            but = step.without and f", not counting {step.without}"
            fits = {True: [f"yes{but}"], False: ["no"], None: []}[step.fits]
            sizes = format_bytes(step.peak), reserved, format_bytes(step.needed)
            rows.add_row(*counts, *sizes, *fits)
        console.print(rows)
        console.print()
        console.print(plain(_note(found[-1], document.process), "dim"))
        for estimated in found:
            if estimated.peak_by_rank:
                console.print(plain(_stages(estimated)))
        if found[-1].on_host:
            on_host = format_bytes(found[-1].on_host)
            console.print(
                plain(f"On the host, the step's tensors take {on_host}, which are not in the peak.")
            )
        for sentence in found[-1].uncounted:
            console.print(plain(f"Warning: {sentence}"))
        _print_advice(console, found[-1])
        if document.saving:
            console.print()
            console.print(saving_table(console, document.saving))


def _stages(found: Estimate) -> str:
    of = "" if found.batch is None else f", batch {found.batch:,}"
    peaks = found.peak_by_rank
    by_rank = ", ".join(f"{rank}: {format_bytes(peak)}" for rank, peak in peaks.items())
    most = next(rank for rank, peak in peaks.items() if peak == found.peak)
    return (
        f"Peak of tensors by rank, one for each stage{of}: {by_rank}. The table is of rank {most}, which "
        "needs most."
    )


def _print_advice(console: Console, found: Estimate) -> None:
    advice = found.advice
    if advice.hints:
        of = "" if found.batch is None else f" of {found.batch:,}"
        console.print()
        console.print(
            plain(f"What would reduce the memory, for a batch{of} (each line is one change alone):")
        )
        print_hints(console, advice.hints)


def _note(found: Estimate, own: int | None) -> str:
    if own is not None:
        return (
            f"needed: the peak with a safety margin of 2 %, and {format_bytes(own)} for the process itself "
            "(Python, torch and the script's libraries, as measured here)"
        )
    besides = "; ".join(
        f"{format_bytes(extra.low)} to {format_bytes(extra.high)} for {extra.what}"
        for extra in found.besides
    )
    return (
        f"peak and reserved: as on the GPU {found.gpu} (--gpu names another); "
        f"needed: reserved with a safety margin of 2 %, and {besides}"
    )
