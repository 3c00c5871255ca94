"""Tensors that each iteration replaces by a larger tensor, such as by `torch.cat` of old and new values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean
from typing import Final

from memlog._internal.units import format_bytes
from memlog.leaks.holders import Holder
from memlog.leaks.watched_storages import Site, WatchedStorage

_JOINS: Final = re.compile("cat|stack|append|pad")
"""Pattern in the names of operations that join tensors."""
_LEAST_ENDS: Final = 3
"""If fewer iterations than this were watched, no tensor counts as becoming larger."""
_EVEN: Final = 0.5
"""A tensor grows evenly if each rise of its size is at least this fraction of the mean rise."""


class SizesAtEnds:
    """Bytes of the newest storages made at each `Site`, recorded at the end of each watched iteration."""

    def __init__(self) -> None:
        self._ends: list[Counter[Site]] = []

    def add(self, storages: Iterable[WatchedStorage], iteration: int) -> None:
        """Record the bytes of each site's new storages at the end of an iteration.

        ``storages`` are the watched storages that are alive.
        """
        sizes: Counter[Site] = Counter()
        for one in storages:
            if one.iteration == iteration:
                sizes[one.site] += one.size
        self._ends.append(sizes)

    def holders(self) -> list[Holder]:
        """Return a `Holder` for each `Site` that joins tensors into a larger tensor in each iteration.

        Sites of other operations are left out. Their results are larger only because their inputs are larger.
        """
        if len(self._ends) < _LEAST_ENDS:
            return []
        joining = [site for site in self._ends[-1] if _JOINS.search(site.operation)]
        rates = {site: self._rate(site) for site in joining}
        return [_holder(site, rate) for site, rate in rates.items() if rate > 0]

    def _rate(self, site: Site) -> float:
        """Return the bytes per iteration by which a site's storages grow; 0 if they do not grow evenly."""
        rises = [after[site] - before[site] for before, after in pairwise(self._ends)]
        mean = fmean(rises)
        return mean if self._ends[0][site] and min(rises) >= _EVEN * mean else 0.0


def _holder(site: Site, rate: float) -> Holder:
    place, _, operation = site.line.partition(": ")
    where = place.partition(" ")[0] or None
    by = f" by `{operation}`" if operation else ""
    at = f" at {where}" if where else ""
    return Holder(
        "kept_tensors",
        f"The tensor made{at}{by} is larger in each step, by {format_bytes(rate)}",
        where,
        rate,
        (f"its size at the ends of iterations rises by {format_bytes(rate)} per step",),
        "medium",
        "Limit its length, or write the older part to a file.",
    )
