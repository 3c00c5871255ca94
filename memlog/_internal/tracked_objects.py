"""All objects that Python's garbage collector tracks, without a risk for other threads."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator
from itertools import chain, compress, islice, repeat, starmap
from typing import Any


def _all_but_tuples(types: Iterator[type]) -> Iterator[bool]:
    return map(operator.is_not, types, repeat(tuple))


def tracked_objects(
    wanted: Callable[[Iterator[type]], Iterator[bool]] = _all_but_tuples,
) -> list[Any]:
    """Return the objects that the collector tracks, except tuples.

    Another thread may be in the middle of ``tuple(…)``. Python raises a SystemError there if a second
    reference to the unfinished tuple exists. So the tuples are left out within one call of a C function,
    during which no other thread runs.

    ``wanted`` gets the objects' types, and returns for each whether to return the object. Its iterator must
    run no Python code.
    """
    # With a variable for the collector's list, another thread could run before the tuples are left out. So
    # the list is made inside the last statement. `twice` yields it two times.
    twice = chain.from_iterable(map(repeat, starmap(gc.get_objects, ((),)), (2,)))
    every, again = (chain.from_iterable(islice(twice, 1)) for _ in range(2))
    is_wanted = wanted(map(type, again))
    # The last two parts yield nothing. They exhaust the iterators, which otherwise would keep the list.
    found = list(chain(compress(every, is_wanted), twice, compress(is_wanted, ())))
    # The new list is tracked, too. The collector yields young objects first.
    for place, one in enumerate(found):
        if one is found:
            del found[place]
            break
    return found
