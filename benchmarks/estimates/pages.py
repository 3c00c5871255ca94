"""Tables of the benchmarks in a page of the documentation."""

from __future__ import annotations

from pathlib import Path


def put_into(file: Path, tables: str, command: str) -> None:
    """Replace the tables that ``command`` wrote into the page before."""
    begin, end = f"<!-- written by {command} -->", f"<!-- end of what {command} writes -->"
    head, _, rest = file.read_text().partition(begin)
    file.write_text(f"{head}{begin}\n\n{tables}\n{end}{rest.partition(end)[2]}")
