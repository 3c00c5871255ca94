"""Commands that read a damaged trace of a worst step print figures or one line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from support.commands import memlog
from support.journals import GIB, MadeRun, batch
from support.models import mlp
from support.training import Case, squares, traced

from memlog.errors import TraceNotFoundError
from memlog.events import Trace
from memlog.journal import RunDirectory
from memlog.reports.worst_step import read_worst_step
from memlog.trace.predict import advise, steady_peak_of
from memlog.tracer.schedule.kept_trace import trace_event

MUTANTS = 3000
SHOWN = 60
"""Number of damaged files with which the commands are also run."""


class Honest(NamedTuple):
    """Undamaged trace of a small model's first step."""

    event: Trace
    file: bytes
    events: range
    """Positions of the events in the file."""

    def mutant(self, seed: int) -> bytes:
        """Return a damaged copy: some bytes changed, mostly in the events, or some bytes added or removed."""
        chance = random.Random(seed)  # noqa: S311 - damage, not secrets
        made = bytearray(self.file)
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            where = chance.choice((self.events,) * 3 + (range(self.events.start), range(len(made))))
            at = min(chance.choice(where), len(made) - 1)
            if chance.random() < 0.9:
                flipped = made[at] ^ 1 << chance.randrange(8)
                made[at] = chance.choice((0, 1, 255, chance.randrange(256), flipped))
            else:
                count, others = chance.choice((0, 1, 8, 32)), chance.choice((0, 1, 32))
                made[at : at + count] = chance.randbytes(others)
        return bytes(made)

    def recorded(self, root: Path, run_id: str) -> RunDirectory:
        run = MadeRun(root, run_id).write(batch(0, GIB), batch(1, GIB), self.event).closed()
        run.worst_step.write_bytes(self.file)
        return run


@pytest.fixture(scope="module")
def honest() -> Honest:
    trace = traced(Case(lambda: mlp(16, 2), lambda batch: torch.randn(batch, 16), squares, 8))
    event = trace_event(trace.result, 0)
    file = msgspec.msgpack.encode((event, trace))
    begin = file.index(trace.events)
    return Honest(event, file, range(begin, begin + len(trace.events)))


@pytest.mark.slow
def test_three_thousand_damaged_traces_are_read_or_refused(tmp_path: Path, honest: Honest) -> None:
    run = honest.recorded(tmp_path, "aaaa1111")
    read = 0
    for seed in range(MUTANTS):
        run.worst_step.write_bytes(honest.mutant(seed))
        try:
            trace = read_worst_step(run).trace
        except TraceNotFoundError:
            continue
        read += 1
        advise(trace)
        steady_peak_of(trace)
    assert MUTANTS / 10 < read < MUTANTS * 9 / 10  # or it would not have been tried


@pytest.mark.slow
def test_the_commands_say_it_in_one_line(
    tmp_path: Path, honest: Honest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLOG_DIR", str(tmp_path))
    honest.recorded(tmp_path, "aaaa1111")
    run = honest.recorded(tmp_path, "bbbb2222")
    for seed in range(SHOWN):
        run.worst_step.write_bytes(honest.mutant(seed))
        # Without the trace's events, a report shows what the journal has.
        assert memlog("report", "bbbb", "-o", str(tmp_path / "report.html")).exit_code == 0
        for command in (["advise", "bbbb"], ["compare", "aaaa", "bbbb"]):
            result = memlog(*command)
            assert isinstance(result.exception, SystemExit | None), (seed, result.exception)
            if result.exit_code:
                [line] = result.stderr.splitlines()
                assert line.startswith("memlog: the traced step of run bbbb2222 can't be read (")
