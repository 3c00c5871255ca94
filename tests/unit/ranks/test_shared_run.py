"""The run that all ranks share, from journals that the ranks have left."""

from pathlib import Path

import pytest
from support.journals import GIB, MIB, MadeRun, at
from support.postmortems import report_of
from support.shared_runs import Told, told_by_all
from support.surfaces import output

from memlog._internal.processes import RankPosition
from memlog.cli.sync import publish_afterwards
from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.events import Alert, Batch, End, Event, Exit, Finding, OutOfMemory, RankFailure, Ranks
from memlog.journal import RunDirectory
from memlog.reports.final_state import final_state
from memlog.reports.oom_diagnosis import Witness

STEPS = 60


class Made:
    """Runs of a training whose processes have all ended."""

    def __init__(self, root: Path, size: int = 2) -> None:
        positions = [RankPosition(rank, size, "a") for rank in range(size)]
        self._made = [
            MadeRun(root, f"rank{each.rank}000", segment_bytes=65536).ranked(each)
            for each in positions
        ]

    def steps(self, rank: int, rate: int = 0, steps: int = STEPS) -> "Made":
        levels = ((step, GIB + rate * step) for step in range(steps))
        return self.write(rank, *(_step(step, level) for step, level in levels))

    def write(self, rank: int, *events: Event) -> "Made":
        self._made[rank].write(*events)
        return self

    def sampled(self, rank: int, *events: Event) -> "Made":
        self._made[rank].sampled(*events)
        return self

    def closed(self) -> list[RunDirectory]:
        return [made.closed() for made in self._made]

    def told(self) -> tuple[Told, RunDirectory]:
        """Complete the shared run as `memlog sync` does."""
        runs = self.closed()
        publish_afterwards(runs[0])
        explain_afterwards(runs[0])
        told = told_by_all(runs[0])
        publish_afterwards(runs[0])
        explain_afterwards(runs[0])
        assert told_by_all(runs[0]) == told
        return told, runs[0]


def _step(step: int, level: int) -> Batch:
    return Batch(at(step / 10), step, level + 64 * MIB, level, "exact", (), level, 8 * MIB)


def failed_allocation(step: int) -> OutOfMemory:
    unknown = (None, None, None)
    return OutOfMemory(at(9), step, "cuda0", GIB, 0, 9 * GIB, None, 8 * GIB, *unknown, "no memory")


def leak(rank_step: int) -> Finding:
    title = "`kept`, a list in `__main__` (train.py:9), gains one tensor per step"
    return Finding(at(3), rank_step, "kept_tensors", title, "train.py:9", 0, 4.0 * MIB, None, None)


def ended(status: str = "finished") -> End:
    return End(at(10), "failed" if status == "failed" else "finished")


def test_the_rank_that_ran_out_of_memory_is_named_though_no_helper_was_left(tmp_path: Path) -> None:
    made = Made(tmp_path).steps(0).steps(1).write(1, failed_allocation(59), ended("failed"))
    told, run = made.told()
    title = "Rank 1 ran out of memory on cuda0 after step 59, 1.0 GiB requested"
    assert told.verdict.startswith(title)
    assert (told.status, len(told.alerts)) == ("failed", 1)
    assert (run.artifacts / "postmortem.md").read_text().startswith(f"# {title}")
    assert told.summary.failed_rank is not None
    assert (told.summary.failed_rank.rank, told.summary.failed_rank.run) == (1, "rank1000")


def test_show_tells_which_rank_failed_first_though_nobody_has_synced(tmp_path: Path) -> None:
    made = Made(tmp_path).steps(0).steps(1).write(1, failed_allocation(59), ended("failed"))
    run, _ = made.closed()
    before = output("show", run, run.id).splitlines()[0]
    assert before.startswith("Rank 1 ran out of memory on cuda0 after step 59")
    publish_afterwards(run)
    explain_afterwards(run)
    assert output("show", run, run.id).splitlines()[0] == before


def test_a_container_that_was_killed_blames_no_rank(tmp_path: Path) -> None:
    told, run = Made(tmp_path).steps(0).steps(1).told()
    assert told.verdict.startswith("Ranks 0 and 1 ended without finishing their runs after step 59")
    assert (told.status, len(told.alerts)) == ("killed", 1)
    title = told.alerts[0]
    assert (run.artifacts / "postmortem.md").read_text().startswith(f"# {title}")


def test_a_rank_that_was_killed_tells_what_was_found_in_it(tmp_path: Path) -> None:
    made = Made(tmp_path).steps(0).steps(1, 4 * MIB).write(1, leak(50))
    made.sampled(1, Exit(at(8), None, "SIGKILL")).sampled(0, Exit(at(8.2), None, "SIGTERM"))
    told, _ = made.told()
    beginning = "Rank 1 was killed by SIGKILL after step 59. `kept`, a list"
    assert told.verdict.startswith(beginning), told.verdict
    assert told.summary.findings[0].rank == 1
    assert told.alerts == ["Rank 1 was killed by SIGKILL after step 59"]


def test_the_same_leak_in_all_ranks_is_told_once(tmp_path: Path) -> None:
    made = Made(tmp_path, 3)
    for rank in range(3):
        made.steps(rank, 4 * MIB).write(rank, leak(50), ended())
    told, run = made.told()
    [finding] = told.summary.findings
    assert finding.rank is None
    assert finding.evidence[-1] == "The same was found in ranks 1 and 2."
    assert told.verdict.startswith("`kept`")
    assert not [each for each in run.events("ranks") if isinstance(each, Alert)]


def test_a_leak_in_two_other_ranks_has_one_alert(tmp_path: Path) -> None:
    made = Made(tmp_path, 3).steps(0).write(0, ended())
    for rank in (1, 2):
        made.steps(rank, 4 * MIB).write(rank, leak(50), ended())
    told, run = made.told()
    [finding] = told.summary.findings
    assert finding.rank == 1
    assert told.verdict.startswith("Rank 1: `kept`, a list")
    [alert] = [each for each in run.events("ranks") if isinstance(each, Alert)]
    assert told.verdict.startswith(alert.title)
    assert told.status == "finished"


def test_memory_that_rises_in_another_rank_is_no_all_clear(tmp_path: Path) -> None:
    made = Made(tmp_path).steps(0).steps(1, 4 * MIB).write(0, ended()).write(1, ended())
    told, _ = made.told()
    assert told.verdict.startswith("Unsure: rank 1: memory rose by "), told.verdict
    assert told.summary.outcome == "unsure"
    assert (told.status, told.alerts) == ("finished", [])


def test_ranks_that_finish_leave_the_verdict_alone(tmp_path: Path) -> None:
    made = Made(tmp_path).steps(0).steps(1).write(0, ended()).write(1, ended())
    told, run = made.told()
    assert told.verdict.startswith("No growth: ")
    assert {type(each) for each in run.events("ranks")} == {Ranks}
    assert told.summary.failed_rank is None


@pytest.mark.parametrize(
    ("signal", "title"),
    [
        ("SIGKILL", "Rank 1 was killed by the kernel because memory ran out after step 29"),
        # The launcher ended it, because the kernel had killed another rank of the same container.
        ("SIGTERM", "Rank 1 was killed by SIGTERM after step 29"),
    ],
)
def test_the_kernels_kill_of_one_rank_is_not_told_of_another(
    tmp_path: Path, signal: str, title: str
) -> None:
    made = MadeRun(tmp_path).ranked(RankPosition(1, 2, "a"))
    made.write(*(_step(step, GIB) for step in range(30)))
    state = final_state(made.sampled(Exit(at(8), None, signal)).closed())
    found = report_of(state, Witness("helper", oom_kills=1))
    assert found.title == title
    assert ("That is the likely cause" in found.text) == (signal == "SIGKILL")


def test_a_rank_without_a_run_here_may_be_the_cause(tmp_path: Path) -> None:
    """Another machine has another folder of runs."""
    made = MadeRun(tmp_path, "rank0000", segment_bytes=65536).ranked(RankPosition(0, 2, "a"))
    made.write(*(_step(step, GIB) for step in range(STEPS)))
    run = made.sampled(Exit(at(8), None, "SIGTERM")).closed()
    publish_afterwards(run)
    [failure] = [each for each in run.events() if isinstance(each, RankFailure)]
    assert failure.title == "Rank 0 was killed by SIGTERM after step 59"
    assert failure.text == "1 of 2 ranks has no run in this folder"
    told = told_by_all(run)
    assert told.verdict.startswith(failure.title)
    assert (told.status, told.alerts) == ("killed", [failure.title])
