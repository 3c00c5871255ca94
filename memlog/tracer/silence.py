"""Keeping our hooks from costing the user a warning (an error, where they are) at each compiled module."""

from __future__ import annotations

import warnings

_TEXT = r"Using `torch\.compile\(module\)` when there are global hooks"


class Silence:
    """A filter for that one warning of torch's, from the beginning until `end`."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message=_TEXT)
        self._filter = warnings.filters[0] if warnings.filters else None

    def end(self) -> None:
        """Takes the filter out. Calling it again is harmless."""
        for place, found in enumerate(warnings.filters):
            if found is self._filter:
                del warnings.filters[place]  # type: ignore[attr-defined] # it is a list, whatever typeshed says
                return
