"""Tables of the comparisons of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def errors_by_model(errors: Mapping[tuple[str, str], Sequence[float]]) -> str:
    """Return one line for each model, with the largest error of each way (the key's second part)."""
    names, ways = (list(dict.fromkeys(key[part] for key in errors)) for part in (0, 1))
    lines = [
        f"| model | {' | '.join(ways)} |",
        f"| --- |{' ---: |' * len(ways)}",
    ]
    for name in names:
        cells = (
            f"{max(errors[name, way], key=abs):+.2%}" if (name, way) in errors else "refused"
            for way in ways
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
