"""From the books of a trace to its result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from memlog.trace.accounting import Accountant, LiveStorage, Row
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
    """What the analysis can't know from the events."""

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


def build(books: Accountant, paths: Sequence[str], facts: TraceFacts) -> TraceResult:
    """The result of a trace whose events have all been folded.

    Args:
        books: Finished.
        paths: Layers by number.
        facts: The rest.
    """
    known = facts.exactness != "none"
    counted = facts.engine != "sampler"
    before = books.before_bytes
    held = _shares(books.at_peak, paths, facts.lines)
    in_modules, nowhere = _attribution(books)
    made = in_modules + sum(nowhere.values())
    return TraceResult(
        engine=facts.engine,
        why=facts.why,
        device=facts.device,
        exactness=facts.exactness,
        started_us=facts.started_us,
        duration_ms=facts.duration_ns / _NS_PER_MS,
        before=before if known else None,
        peak=before + books.peak_bytes if known else None,
        peak_ms=books.peak_ns / _NS_PER_MS if known else None,
        end=before + books.live_bytes if known else None,
        categories=_categories(books.at_peak),
        shares=held,
        layers=tuple(_layers(books, paths, before if known else None, counted=counted)),
        attributed=in_modules / made if made else None,
        unattributed=nowhere if counted else {},
        fragmentation=facts.fragmentation,
        fragmentation_reason=facts.fragmentation_reason,
        events=facts.events,
        kept_events=facts.kept_events,
        truncated=facts.kept_events < facts.events,
        dropped=facts.dropped,
        unseen=facts.unseen,
        lines=_lines(books, facts.lines),
    )


def with_parents(path: str, root: str) -> list[str]:
    """A path and what it lies in, outermost first: ``root, "blocks", "blocks.0"``.

    Args:
        path: Of a module.
        root: The model's own path, which is a prefix of none of the others.
    """
    if path in (root, OUTSIDE_PATH):
        return [path]
    parts = path.split(".")
    chain = [".".join(parts[: count + 1]) for count in range(len(parts))]
    # A module that the model doesn't own (a loss) is a root of its own.
    return chain if not root or parts[0].startswith("(") else [root, *chain]


def _categories(held: Iterable[LiveStorage]) -> dict[str, int]:
    sizes: Counter[int] = Counter()
    for one in held:
        sizes[one.final_category] += one.size
    return {CATEGORIES[number]: size for number, size in sizes.most_common() if size}


def _shares(
    held: Iterable[LiveStorage], paths: Sequence[str], lines: Sequence[str]
) -> tuple[Share, ...]:
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    for one in held:
        line = one.line if one.layer == OUTSIDE else 0  # a gradient turns out to be a layer's
        sizes[one.layer, one.phase, one.final_category, line] += one.size
    return tuple(
        Share(paths[layer], PHASES[phase], CATEGORIES[category], size, _text(line, lines))
        for (layer, phase, category, line), size in sizes.most_common()
        if size
    )


def _text(line: int, lines: Sequence[str]) -> str:
    return lines[line - 1] if line else ""


def _lines(books: Accountant, lines: Sequence[str]) -> tuple[LineFigures, ...]:
    held: Counter[int] = Counter()
    for one in books.at_peak:
        if one.layer == OUTSIDE:
            held[one.line] += one.size
    figures = (
        LineFigures(lines[line - 1], allocated, held[line])
        for line, allocated in books.lines.items()
    )
    return tuple(sorted(figures, key=lambda one: (-one.at_peak, -one.allocated, one.line)))


def _attribution(books: Accountant) -> tuple[int, dict[str, int]]:
    """Bytes of the forward and backward passes in modules, and those in none by phase."""
    in_modules, nowhere = 0, dict.fromkeys((PHASES[FORWARD], PHASES[BACKWARD]), 0)
    for (layer, phase), row in books.rows.items():
        if layer == OUTSIDE and phase in (FORWARD, BACKWARD):
            nowhere[PHASES[phase]] += row.allocated
        elif layer != OUTSIDE:
            in_modules += row.allocated
    return in_modules, nowhere


def _layers(
    books: Accountant, paths: Sequence[str], before: int | None, *, counted: bool
) -> Iterator[LayerFigures]:
    rows: defaultdict[int, dict[int, Row]] = defaultdict(dict)
    for (layer, phase), row in books.rows.items():
        rows[layer][phase] = row
    own: Counter[int] = Counter()
    for one in books.at_peak:
        own[one.layer] += one.size
    totals, peaks = _with_children(rows, own, paths)
    for layer in sorted({*rows, *own}):
        held = own[layer] if counted else None
        yield _layer(paths[layer], rows[layer], held, before, totals, peaks)


def _with_children(
    rows: dict[int, dict[int, Row]], own: Counter[int], paths: Sequence[str]
) -> tuple[Counter[str], dict[str, dict[int, int]]]:
    """By path, the children's included: bytes at the peak, and peaks by phase."""
    root = paths[1] if len(paths) > 1 else ""
    totals: Counter[str] = Counter()
    peaks: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for layer in {*rows, *own}:
        for path in with_parents(paths[layer], root):
            totals[path] += own[layer]
            reached = peaks[path]
            for phase, row in rows[layer].items():
                if row.peak is not None:
                    reached[phase] = max(row.peak, reached.get(phase, row.peak))
    return totals, peaks


def _layer(
    path: str,
    rows: dict[int, Row],
    at_peak: int | None,
    before: int | None,
    totals: Counter[str],
    peaks: dict[str, dict[int, int]],
) -> LayerFigures:
    """One layer's figures.

    ``at_peak`` is ``None`` where allocations were not seen, ``before`` where nobody can tell bytes at all.
    """
    counted = at_peak is not None
    reached = peaks.get(path, {})
    highest = max(reached.values(), default=None)
    readings = sum(row.readings for row in rows.values())
    return LayerFigures(
        path=path,
        phases=tuple(
            _phase(phase, rows[phase], before, reached.get(phase), counted=counted)
            for phase in sorted(rows)
        ),
        allocated=sum(row.allocated for row in rows.values()) if counted else None,
        peak=_over(before, highest),
        at_peak=at_peak,
        at_peak_total=totals[path] if counted else None,
        time_ms=sum(row.time_ns for row in rows.values()) / _NS_PER_MS,
        reserved_peak=max(row.reserved_peak for row in rows.values()) if readings else None,
        fragmentation=(
            sum(row.unused_share for row in rows.values()) / readings if readings else None
        ),
    )


def _phase(
    number: int, row: Row, before: int | None, peak: int | None, *, counted: bool
) -> PhaseFigures:
    return PhaseFigures(
        phase=PHASES[number],
        calls=row.calls,
        allocations=row.allocations if counted else None,
        allocated=row.allocated if counted else None,
        frees=row.frees if counted else None,
        peak=_over(before, peak),
        kept=None if before is None else row.kept,
        time_ms=row.time_ns / _NS_PER_MS,
    )


def _over(before: int | None, level: int | None) -> int | None:
    return None if before is None or level is None else before + level
