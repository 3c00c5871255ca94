"""The run that a user names, with what its ranks' journals tell about its end."""

from __future__ import annotations

from pathlib import Path

from memlog.journal import RunDirectory
from memlog.ranks.registration import find_named_run, registration_of


def find_explained_run(root: Path, name: str) -> RunDirectory:
    """Return the run that a user names; see `find_named_run`.

    If its training ended badly and no helper process was left to write which rank failed first, write it now.
    Otherwise, the run would say only that its own process ended unexpectedly.
    """
    run = find_named_run(root, name)
    if registration_of(run) is not None and run.rank_failure() is None:
        end = run.end()
        if end is None or end.status != "finished":
            # Imported here: most runs train alone.
            from memlog.delivery.helper.rank_journal import publish_afterwards  # noqa: PLC0415

            publish_afterwards(run)
    return run
