"""Ranks of one training: their positions, their memory side by side, and how they end."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.journals import GIB, MIB, MadeRun, at, batch, cuda

from memlog._internal.processes import RankPosition, rank_position_in
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.events import (
    LOST_CONNECTION,
    Alert,
    End,
    Exit,
    OutOfMemory,
    RankFailure,
    Ranks,
)
from memlog.journal import RunDirectory
from memlog.metrics import values
from memlog.ranks.ends import RankEnd, bad_end, failure_of
from memlog.ranks.registration import (
    Attempt,
    attempt_before,
    ranks_of,
    register,
    registration_of,
    steps_ahead,
)
from memlog.ranks.spreads import STALLED_AFTER, RankSpreads, Stalls


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "TORCHELASTIC_RUN_ID": "a1",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "2",
            },
            RankPosition(3, 4, "torchelastic a1", 1, 2),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_JOB_ID": "42",
                "SLURM_STEP_ID": "0",
            },
            RankPosition(5, 8, "slurm 42.0", 1),
        ),
        # The batch script itself is no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "42"}, None),
        (
            {"RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "1", "HOSTNAME": "gpt-worker-1"},
            RankPosition(2, 4, "pod gpt"),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1", "HOSTNAME": "gpt-master-0"},
            RankPosition(0, 4, "pod gpt"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "PMIX_NAMESPACE": "n7",
            },
            RankPosition(1, 2, "mpi n7", 1),
        ),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "7",
                "HOSTNAME": "h",
            },
            RankPosition(1, 2, "h:7"),
        ),
    ],
)
def test_each_launcher_is_known(environment: dict[str, str], expected: RankPosition | None) -> None:
    assert rank_position_in(environment) == expected


def test_a_step_names_its_smallest_and_largest_rank() -> None:
    spreads = RankSpreads(3)
    for rank, size in ((0, 2 * GIB), (1, 3 * GIB), (2, GIB)):
        spreads.know(rank)
        spreads.add(rank, batch(0, size, cuda(size, 2 * size)))
    [event] = spreads.take()
    known = {value.name: value.value for value in values(event)}
    at_host = "memory/ranks/host/rss"
    assert known["memory/ranks/reporting"] == 3
    assert (known[f"{at_host}_min_rank"], known[f"{at_host}_max_rank"]) == (2, 1)
    assert known[f"{at_host}_min_mib"] == GIB / MIB
    assert known[f"{at_host}_mean_mib"] == 2 * GIB / MIB
    assert known[f"{at_host}_max_mib"] == 3 * GIB / MIB
    assert known[f"{at_host}_imbalance"] == 0.5
    assert known["memory/ranks/device/peak_max_rank"] == 1


def test_one_rank_is_no_comparison() -> None:
    spreads = RankSpreads(2)
    spreads.add(0, batch(0, GIB))
    assert list(spreads.take(final=True)) == []


def test_a_step_waits_for_every_rank_that_has_not_ended() -> None:
    spreads = RankSpreads(3)
    for rank in (0, 1):
        spreads.add(rank, batch(0, GIB))
    assert list(spreads.take()) == []  # the third may have a run that is not found yet
    spreads.know(2)
    assert list(spreads.take()) == []
    spreads.end(2)
    assert [(event.step, event.reporting) for event in spreads.take()] == [(0, 2)]


def test_the_same_journals_give_the_same_events_in_any_order_of_reading() -> None:
    def combined(order: list[tuple[int, int]]) -> list[Ranks]:
        spreads = RankSpreads(2)
        for rank, step in order:
            spreads.add(rank, batch(step, (rank + step + 1) * MIB))
        return list(spreads.take(final=True))

    lockstep = [(rank, step) for step in range(50) for rank in range(2)]
    behind = [(rank, step) for rank in range(2) for step in range(50)]
    assert combined(lockstep) == combined(behind)
    assert len(combined(lockstep)) == 50


def test_a_later_process_publishes_only_what_is_missing() -> None:
    spreads = RankSpreads(2, after=7)
    for step in range(10):
        for rank in range(2):
            spreads.add(rank, batch(step, GIB))
    assert [event.step for event in spreads.take(final=True)] == [8, 9]


def test_long_runs_have_a_point_for_several_steps() -> None:
    spreads = RankSpreads(2)
    for step in range(9_990, 10_030):
        for rank in range(2):
            spreads.add(rank, batch(step, step * MIB))
    events = list(spreads.take(final=True))
    assert [event.step for event in events][-4:] == [9_999, 10_009, 10_019, 10_029]
    assert events[-1].spreads[0].largest == 10_029 * MIB


def test_ranks_are_found_by_their_registration(tmp_path: Path) -> None:
    mine = MadeRun(tmp_path, "mine0000").ranked(RankPosition(0, 2, "a")).closed()
    MadeRun(tmp_path, "mine1111").ranked(RankPosition(1, 2, "a"), begun=1).closed()
    MadeRun(tmp_path, "later111").ranked(RankPosition(1, 2, "a"), begun=9_000).closed()
    MadeRun(tmp_path, "again111").ranked(RankPosition(1, 2, "a", restart=1), begun=1).closed()
    MadeRun(tmp_path, "other111").ranked(RankPosition(1, 2, "b")).closed()
    MadeRun(tmp_path, "alone000").closed()
    assert {rank: run.id for rank, run in ranks_of(mine).items()} == {0: "mine0000", 1: "mine1111"}


def test_another_machine_may_have_counted_another_number_of_restarts(tmp_path: Path) -> None:
    mine = MadeRun(tmp_path, "mine0000").ranked(RankPosition(0, 2, "a")).closed()
    theirs = (
        MadeRun(tmp_path, "theirs11").ranked(RankPosition(1, 2, "a", restart=1), begun=1).closed()
    )
    registration = registration_of(theirs)
    assert registration is not None
    there = msgspec.structs.replace(registration, host="another machine")
    (theirs.path / "rank.json").write_bytes(msgspec.json.encode(there))
    assert list(ranks_of(mine)) == list(ranks_of(theirs)) == [0, 1]


@pytest.mark.parametrize(
    ("job", "rank", "alive", "goes_on"),
    [
        ("torchelastic a", 0, False, True),
        ("torchelastic a", 0, True, False),  # two sessions of one process
        ("torchelastic a", 1, False, False),
        ("127.0.0.1:29500", 0, False, False),  # `mp.spawn` again: another training
    ],
)
def test_torchrun_starts_a_rank_again_without_counting_it(
    tmp_path: Path, job: str, rank: int, alive: bool, goes_on: bool
) -> None:
    position = RankPosition(rank, 2, job)
    MadeRun(tmp_path, "first000", alive=alive).ranked(position).write(batch(0, GIB)).closed()
    before = attempt_before(MadeRun(tmp_path, "second00").directory, position, at(10))
    assert before == (Attempt("first000", "first000", 1) if goes_on else None)


def test_a_restart_goes_on_behind_the_newest_attempt_of_its_launcher(tmp_path: Path) -> None:
    def attempt(name: str, restart: int, begun: float, first_step: int = 0) -> RunDirectory:
        made, position = MadeRun(tmp_path, name), RankPosition(0, 2, "a", restart=restart)
        before = attempt_before(made.directory, position, at(begun))
        register(made.directory, position, at(begun), before)
        return made.write(*(batch(first_step + step, GIB) for step in range(5))).closed()

    def before(run: RunDirectory) -> Attempt | None:
        registration = registration_of(run)
        assert registration is not None
        return registration.before

    assert before(attempt("first000", 0, 0)) is None
    other = msgspec.structs.replace(
        register(attempt("other000", 0, 5), RankPosition(0, 2, "a"), at(5)),
        parent=os.getppid() + 1,
    )
    (tmp_path / "other000" / "rank.json").write_bytes(msgspec.json.encode(other))
    second = attempt("second00", 1, 10)
    assert before(second) == Attempt("first000", "first000", 5)
    assert steps_ahead(second) == 5
    third = attempt(
        "third000", 2, 20, first_step=7
    )  # it has loaded a state and counts on from there
    assert before(third) == Attempt("second00", "first000", 10)
    assert steps_ahead(third) == 0
    assert before(attempt("fourth00", 3, 30)) == Attempt("third000", "first000", 12)


def ended(rank: int, seconds: float, signal: str | None = None, host: str | None = None) -> RankEnd:
    event = End(at(seconds), "failed") if signal is None else Exit(at(seconds), None, signal)
    return end_of(rank, event, host=host)


def end_of(rank: int, event: End | Exit, **known: Any) -> RankEnd:
    end = bad_end(rank, event, 7, **known)
    assert end is not None
    return end


def test_the_first_rank_to_end_is_named() -> None:
    failure = failure_of(
        [ended(0, 9.1, "SIGTERM"), ended(3, 9, "SIGKILL"), ended(1, 9.1, "SIGTERM")]
    )
    assert failure is not None
    assert failure.title == "Rank 3 was killed by SIGKILL after step 7"
    assert failure.text.startswith(
        "ranks 0 and 1 ended afterwards (SIGTERM): they are not the cause"
    )


@pytest.mark.parametrize(
    ("signal", "later", "first"),
    [
        ("SIGKILL", 0.4, 1),
        ("SIGSEGV", 1.9, 1),
        ("SIGKILL", 6, 0),
        ("SIGTERM", 0.4, 0),
        ("SIGABRT", 1, 0),
    ],
)
def test_a_killed_rank_is_the_cause_though_noticed_late(
    signal: str, later: float, first: int
) -> None:
    failure = failure_of([ended(0, 9), ended(1, 9 + later, signal)])
    assert failure is not None
    assert failure.first is not None
    assert failure.first.rank == first


def test_no_rank_is_named_if_all_were_ended_from_outside() -> None:
    failure = failure_of([ended(rank, 9 + rank / 10, "SIGTERM") for rank in range(3)])
    assert failure is not None
    assert failure.first is None
    assert failure.title == "Ranks 0, 1 and 2 were killed by SIGTERM after step 7"
    assert bad_end(0, End(at(9), "finished"), 7) is None
    assert failure_of([]) is None


def interrupted(rank: int, seconds: float) -> RankEnd:
    return end_of(rank, End(at(seconds), "killed"))


def disconnected(rank: int, seconds: float) -> RankEnd:
    return end_of(rank, End(at(seconds), "failed", LOST_CONNECTION))


def lost(rank: int, seconds: float) -> RankEnd:
    return end_of(rank, Exit(at(seconds), None, None), lost=True)


def reaped(rank: int, seconds: float) -> RankEnd:
    """A rank whose launcher had waited for it before the helper process could read how it ended."""
    return end_of(rank, Exit(at(seconds), None, None))


def out_of_memory(rank: int, seconds: float, event: End | Exit, host: str | None = None) -> RankEnd:
    failed = OutOfMemory(at(seconds), 7, "cuda0", MIB, *[None] * 7, "out of memory")
    return end_of(rank, event, failure=failed, host=host)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # It ran out of memory before the others ended, but its process ended after them.
        ([disconnected(0, 9.2), out_of_memory(1, 9, End(at(14), "failed"))], 1),
        # The group of processes was destroyed before the exception ended the program.
        ([disconnected(0, 9), ended(1, 12)], 1),
        ([disconnected(0, 9), ended(1, 9.1, "SIGTERM"), ended(2, 15)], 2),
        # The program caught the signal that the launcher sent after a failure to allocate.
        ([ended(0, 9.1, "SIGTERM"), out_of_memory(1, 9, Exit(at(9.2), None, "SIGTERM"))], 1),
        # The clock of another machine is late.
        ([ended(0, 8.5, "SIGTERM", "b"), ended(1, 9, host="a")], 1),
        ([ended(0, 8.5, "SIGTERM", "a"), ended(1, 9, host="a")], 0),
        # Nobody saw the end of rank 1. Its last event was before the failure of rank 0.
        ([lost(1, 8), ended(0, 9)], 0),
        ([lost(1, 8), disconnected(0, 9)], 1),
        ([lost(1, 8), ended(0, 40, "SIGKILL")], 0),
        ([lost(1, 8), interrupted(0, 100)], 1),
        ([reaped(1, 9), disconnected(0, 9.1)], 1),
        ([reaped(1, 9), ended(0, 9.1, "SIGTERM")], 1),
        ([reaped(1, 9.1), ended(0, 9)], 0),
        ([reaped(1, 9), ended(0, 60, "SIGKILL")], 1),
        ([reaped(0, 9), reaped(1, 9.1)], None),
        # Ctrl-C: one rank handles it first, and the other's collective fails before or after.
        ([ended(0, 9), interrupted(1, 9.3)], 1),
        ([interrupted(1, 9), disconnected(0, 9.3)], 1),
        ([interrupted(0, 9), interrupted(1, 9.3)], None),
        ([interrupted(0, 9), ended(1, 9.3, "SIGTERM")], None),
        # The container or the machine ended all of them.
        ([lost(0, 8), lost(1, 9)], None),
        # Only the connection failed.
        ([disconnected(0, 9), disconnected(1, 9.1)], None),
        ([disconnected(0, 9), ended(1, 9.1, "SIGTERM")], None),
    ],
)
def test_the_rank_that_failed_first_is_named_or_none(
    ends: list[RankEnd], first: int | None
) -> None:
    failure = failure_of(ends, 3)
    assert failure is not None
    assert (None if failure.first is None else failure.first.rank) == first


def test_ranks_without_a_run_here_may_be_the_cause() -> None:
    failure = failure_of([ended(0, 9, "SIGTERM"), ended(1, 9, "SIGTERM")], 4, 2)
    assert failure is not None
    assert failure.text == "2 of 4 ranks have no run in this folder, and may have failed before"
    failure = failure_of([disconnected(0, 9), ended(1, 9.1, "SIGTERM")], 4, 2)
    assert failure is not None
    assert failure.title == "Rank 0 lost the connection to another rank after step 7"
    assert failure.status == "failed"


def test_ranks_that_run_out_of_memory_together_are_named() -> None:
    failure = failure_of(
        [out_of_memory(rank, 9 - rank, End(at(10), "failed")) for rank in range(3)]
    )
    assert failure is not None
    assert failure.title == "Rank 2 ran out of memory after step 7"
    assert failure.text == "ranks 0 and 1 ran out of memory, too"


def test_a_rank_that_stalls_is_named_once_if_its_state_shows_it() -> None:
    stalls, states = Stalls(), {0: "S", 1: "T"}
    for step in range(3):
        for rank in states:
            stalls.step(rank, step, now=step)
    later = 2 + STALLED_AFTER
    assert list(stalls.look(later - 1, states.get)) == []
    [found] = stalls.look(later, states.get)
    assert (found.rank, found.step, found.why) == (1, 2, "its process is stopped")
    assert list(stalls.look(later + 1, states.get)) == []
    for rank in states:
        stalls.step(rank, 3, now=later + 2)
    assert [(stall.rank, stall.why) for stall in stalls.look(later + 3, states.get)] == [(1, None)]


def test_no_rank_is_named_if_nothing_tells_which_one_stalls() -> None:
    stalls = Stalls()
    for rank in range(2):
        stalls.step(rank, 5, now=0)
    assert list(stalls.look(10 * STALLED_AFTER, lambda _: "S")) == []
    stalls.step(0, 6, now=1)
    [found] = stalls.look(10 * STALLED_AFTER, lambda _: "S")
    assert (found.rank, found.why) == (1, "other ranks have completed step 6")


def test_a_helper_process_that_replaces_another_repeats_nothing(tmp_path: Path) -> None:
    positions = [RankPosition(rank, 2, "a") for rank in range(2)]
    made = [MadeRun(tmp_path, f"rank{position.rank}000").ranked(position) for position in positions]
    for run in made:
        run.write(*(batch(step, GIB) for step in range(5)), End(at(1), "failed"))
    runs = [run.closed() for run in made]

    def published() -> list[object]:
        publish_afterwards(runs[0])
        return list(runs[0].events("ranks"))

    first = published()
    assert [type(event) for event in first] == [Ranks] * 5 + [RankFailure, Alert]
    assert published() == first
    publish_afterwards(runs[1])
    assert not runs[1].files("ranks")
