"""Word count without PyTorch, for a few seconds, with a mistake that memlog reports: `memlog demo --tiny`.

    python examples/count_words.py

The lines for memlog are ``memlog.init``, ``session.step`` after each page, and ``memlog.finish``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pydoc_data.topics import topics  # English text that comes with every Python

import memlog

PAGE = 100_000
"""Characters of a page."""


def count_words(session: memlog.Session, pages: int) -> Counter[str]:
    """Return how often each word occurs on the pages, which begin at different places of the text."""
    text = " ".join(topics.values())
    counts: Counter[str] = Counter()
    done: list[str] = []
    for number in range(pages):
        start = number * 7919 % (len(text) - PAGE)
        page = text[start : start + PAGE]
        counts.update(page.split())
        done.append(page)  # The mistake: no page is read again, and the list keeps all of them.
        session.step()  # memlog reads the memory here
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Count words, recorded by memlog.")
    parser.add_argument("--steps", type=int, default=400, help="pages, one a step (%(default)s)")
    pages = parser.parse_args().steps
    session = memlog.init("local", project="memlog-demo", name="count-words")
    print(f"Counting the words of {pages} pages, all of which the program keeps by mistake.")
    counts = count_words(session, pages)
    print(f"It has counted {counts.total():,} words, {len(counts):,} different ones.")
    memlog.finish()  # its last lines are the verdict and where to look


if __name__ == "__main__":
    main()
