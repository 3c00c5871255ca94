"""Result of a trace, built from its accounting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from memlog.trace.accounting import Accountant, LayerPhase, LiveStorage
from memlog.trace.encoding import BACKWARD, CATEGORIES, FORWARD, OUTSIDE, OUTSIDE_PATH, PHASES
from memlog.trace.records import (
    EngineName,
    Exactness,
    Fragmentation,
    LayerFigures,
    LineFigures,
    PhaseFigures,
    Share,
    TraceResult,
)

_NS_PER_MS = 1e6


class TraceFacts(msgspec.Struct, frozen=True):
    """Facts about a trace that the events do not hold."""

    engine: EngineName
    why: str
    device: str
    exactness: Exactness
    started_us: int
    duration_ns: int
    events: int
    kept_events: int
    dropped: dict[str, int]
    unseen: tuple[str, ...]
    fragmentation: Fragmentation | None
    fragmentation_reason: str | None
    lines: tuple[str, ...] = ()


def build(accountant: Accountant, paths: Sequence[str], facts: TraceFacts) -> TraceResult:
    """Build the result of a trace from its finished accounting."""
    known = facts.exactness != "none"
    counted = facts.engine != "sampler"
    before = accountant.before_bytes
    in_modules, outside = _attribution(accountant)
    total = in_modules + sum(outside.values())
    return TraceResult(
        engine=facts.engine,
        why=facts.why,
        device=facts.device,
        exactness=facts.exactness,
        started_us=facts.started_us,
        duration_ms=facts.duration_ns / _NS_PER_MS,
        before=before if known else None,
        peak=before + accountant.peak_bytes if known else None,
        peak_ms=accountant.peak_ns / _NS_PER_MS if known else None,
        end=before + accountant.live_bytes if known else None,
        categories=_categories(accountant.at_peak),
        shares=_shares(accountant.at_peak, paths, facts.lines),
        layers=tuple(_layers(accountant, paths, before if known else None, counted=counted)),
        attributed=in_modules / total if total else None,
        unattributed=outside if counted else {},
        fragmentation=facts.fragmentation,
        fragmentation_reason=facts.fragmentation_reason,
        events=facts.events,
        kept_events=facts.kept_events,
        truncated=facts.kept_events < facts.events,
        dropped=facts.dropped,
        unseen=facts.unseen,
        lines=_lines(accountant, facts.lines),
    )


def with_parents(path: str, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of a module's parents, the outermost first, and then the module's own path.

    In the model ``"GPT"``, the result for ``"blocks.0"`` is ``("GPT", "blocks", "blocks.0")``.

    ``paths``: Paths of the layers. ``paths[1]`` is the model, and exists after the first module call.
    """
    root = paths[1] if len(paths) > 1 else ""
    if path in (root, OUTSIDE_PATH):
        return (path,)
    parts = path.split(".")
    chain = tuple(".".join(parts[: count + 1]) for count in range(len(parts)))
    # A module outside the model (a loss) is not below the model.
    return chain if not root or parts[0].startswith("(") else (root, *chain)


def common_length(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    for number, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return number
    return min(len(left), len(right))


def _categories(storages: Iterable[LiveStorage]) -> dict[str, int]:
    sizes: Counter[int] = Counter()
    for storage in storages:
        sizes[storage.final_category] += storage.size
    return {CATEGORIES[number]: size for number, size in sizes.most_common() if size}


def _shares(
    storages: Iterable[LiveStorage], paths: Sequence[str], lines: Sequence[str]
) -> tuple[Share, ...]:
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    for storage in storages:
        # A gradient that a line allocated can later be classified as a layer's. Then the line does not count.
        line = storage.line if storage.layer == OUTSIDE else 0
        sizes[storage.layer, storage.phase, storage.final_category, line] += storage.size
    return tuple(
        Share(
            paths[layer], PHASES[phase], CATEGORIES[category], size, lines[line - 1] if line else ""
        )
        for (layer, phase, category, line), size in sizes.most_common()
        if size
    )


def _lines(accountant: Accountant, lines: Sequence[str]) -> tuple[LineFigures, ...]:
    at_peak: Counter[int] = Counter()
    for storage in accountant.at_peak:
        if storage.layer == OUTSIDE:
            at_peak[storage.line] += storage.size
    figures = (
        LineFigures(lines[line - 1], allocated, at_peak[line])
        for line, allocated in accountant.lines.items()
    )
    return tuple(sorted(figures, key=lambda line: (-line.at_peak, -line.allocated, line.line)))


def _attribution(accountant: Accountant) -> tuple[int, dict[str, int]]:
    """Return the bytes allocated in modules, and a dictionary of the bytes outside all modules, by phase."""
    in_modules, outside = 0, dict.fromkeys((PHASES[FORWARD], PHASES[BACKWARD]), 0)
    for (layer, phase), row in accountant.rows.items():
        if layer == OUTSIDE and phase in (FORWARD, BACKWARD):
            outside[PHASES[phase]] += row.allocated
        elif layer != OUTSIDE:
            in_modules += row.allocated
    return in_modules, outside


def _layers(
    accountant: Accountant, paths: Sequence[str], before: int | None, *, counted: bool
) -> Iterator[LayerFigures]:
    rows: defaultdict[int, dict[int, LayerPhase]] = defaultdict(dict)
    for (layer, phase), row in accountant.rows.items():
        rows[layer][phase] = row
    own: Counter[int] = Counter()
    for storage in accountant.at_peak:
        own[storage.layer] += storage.size
    totals, peaks = _with_children(rows, own, paths)
    for layer in sorted({*rows, *own}):
        at_peak = own[layer] if counted else None
        known = before is not None and layer != OUTSIDE
        added = accountant.added.get(layer) if known else None
        yield _layer(paths[layer], rows[layer], at_peak, before, totals, peaks, added)


def _with_children(
    rows: dict[int, dict[int, LayerPhase]], own: Counter[int], paths: Sequence[str]
) -> tuple[Counter[str], dict[str, dict[int, int]]]:
    """Return two dictionaries by path: the bytes at the peak, and the highest live bytes of each phase.

    Both include the children of a layer.
    """
    totals: Counter[str] = Counter()
    peaks: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for layer in {*rows, *own}:
        for path in with_parents(paths[layer], paths):
            totals[path] += own[layer]
            by_phase = peaks[path]
            for phase, row in rows[layer].items():
                if row.peak is not None:
                    by_phase[phase] = max(row.peak, by_phase.get(phase, row.peak))
    return totals, peaks


def _layer(
    path: str,
    rows: dict[int, LayerPhase],
    at_peak: int | None,
    before: int | None,
    totals: Counter[str],
    peaks: dict[str, dict[int, int]],
    added: int | None,
) -> LayerFigures:
    """Build one layer's figures.

    ``at_peak``: Bytes of the layer itself at the trace's peak; ``None`` if the engine saw no allocations.
    ``before``: Bytes that were live before the trace; ``None`` if the engine can't measure bytes.
    """
    counted = at_peak is not None
    by_phase = peaks[path]
    readings = sum(row.readings for row in rows.values())
    return LayerFigures(
        path=path,
        phases=tuple(
            _phase(phase, rows[phase], before, by_phase.get(phase), counted=counted)
            for phase in sorted(rows)
        ),
        allocated=sum(row.allocated for row in rows.values()) if counted else None,
        peak=_above(before, max(by_phase.values(), default=None)),
        at_peak=at_peak,
        at_peak_total=totals[path] if counted else None,
        time_ms=sum(row.time_ns for row in rows.values()) / _NS_PER_MS,
        reserved_peak=max(row.reserved_peak for row in rows.values()) if readings else None,
        fragmentation=(
            sum(row.unused_share for row in rows.values()) / readings if readings else None
        ),
        added=added,
    )


def _phase(
    number: int, row: LayerPhase, before: int | None, peak: int | None, *, counted: bool
) -> PhaseFigures:
    return PhaseFigures(
        phase=PHASES[number],
        calls=row.calls,
        allocations=row.allocations if counted else None,
        allocated=row.allocated if counted else None,
        frees=row.frees if counted else None,
        peak=_above(before, peak),
        kept=None if before is None else row.kept,
        time_ms=row.time_ns / _NS_PER_MS,
    )


def _above(before: int | None, level: int | None) -> int | None:
    return None if before is None or level is None else before + level
