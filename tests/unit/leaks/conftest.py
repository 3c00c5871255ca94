"""Fixtures of the tests about what holds memory."""

from __future__ import annotations

import math
from types import FrameType

import pytest

from memlog.leaks import growers, holder_search, inquiry, owner_chain, periodic_search, program_walk


@pytest.fixture
def only_this_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let walks begin at this test file's variables alone: those of pytest lead to all of its objects.

    Their time has no limits: one collection of the garbage of this process can take a tenth of a second.
    """
    frames, file, name = owner_chain.running_frames, str(request.path), request.module.__name__

    def own() -> list[FrameType]:
        return [one for one in frames() if one.f_code.co_filename == file]

    for module, limit in (
        (program_walk, "_LONGEST"),
        (program_walk, "_SLICE"),
        (holder_search, "_MOST_AT_ONCE"),
        (inquiry, "_LEAST_SECONDS"),
        (periodic_search, "_SECONDS"),
        (growers, "_WEIGHING"),
    ):
        monkeypatch.setattr(module, limit, math.inf)
    monkeypatch.setattr(owner_chain, "running_frames", own)
    monkeypatch.setattr(program_walk, "running_frames", own)
    monkeypatch.setattr(
        program_walk.ProgramWalk, "_is_program_module", lambda _, module: module == name
    )
