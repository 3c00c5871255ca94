"""Output of `memlog show --brief`."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.commands import complaint, memlog, output_of
from support.journals import GIB, MIB, MadeRun, at, batch, finished_run
from support.planted_runs import planted_run

from memlog.delivery.helper.postmortem import explain_afterwards
from memlog.delivery.helper.rank_journal import publish_afterwards
from memlog.events import Artifact, End, Finding, OutOfMemory, Run
from memlog.journal import RunDirectory
from memlog.reports import summarize
from memlog.reports.brief import MOST_TOKENS, tokens

pytestmark = pytest.mark.usefixtures("plain_environment")


def told(text: str) -> Mapping[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def leaking(root: Path, **changed: object) -> RunDirectory:
    finding = {
        "title": "`losses`, a list in `main()` (train.py:12), gains one tensor per step.",
        "where": "train.py:12",
        "evidence": ("4 of 4 steps added a tensor to `losses`.", "Each has 1 MiB."),
        "remedy": "Append `loss.item()` in place of the loss.",
        **changed,
    }
    made = MadeRun(root).write(*(batch(step, GIB + step * MIB) for step in range(40)))
    made.write(
        Finding(
            time_us=at(5),
            kind="kept_tensors",
            since_step=0,
            rate=float(MIB),
            forecast=None,
            limit=None,
            confidence="high",
            step=39,
            memory="host",
            **finding,  # type: ignore[arg-type]
        )
    )
    return made.write(End(at(6), "finished")).closed()


def test_it_tells_the_cause_the_place_the_remedy_and_what_to_run(tmp_path: Path) -> None:
    run = leaking(tmp_path)
    lines = output_of("show", "latest", "--brief").splitlines()
    assert lines == [
        f"verdict: {summarize(run).verdict}",
        "cause: kept tensors, high confidence: 4 of 4 steps added a tensor to `losses`. Each has 1 MiB.",
        "place: train.py:12",
        "remedy: Append `loss.item()` in place of the loss.",
        "run: k7m2xq9a, finished, 40 steps",
        "next: change the program, train again, then `memlog compare k7m2xq9a latest`",
    ]
    command = lines[-1].partition("`")[2].strip("`")
    assert memlog(*shlex.split(command)[1:]).exit_code == 0


@pytest.mark.parametrize("seed", range(0, 66, 6))
def test_every_kind_of_run_fits(tmp_path: Path, seed: int) -> None:
    run, _ = planted_run(tmp_path, seed)
    publish_afterwards(run)
    explain_afterwards(run)
    text = output_of("show", run.id, "--brief")
    assert tokens(text) <= MOST_TOKENS
    assert set(told(text)) >= {"verdict", "run", "next"}


def test_long_texts_are_cut_and_commands_are_not(tmp_path: Path) -> None:
    long = "a name of a variable " * 200
    run = leaking(tmp_path, title=long, where=long, evidence=(long,), remedy=long)
    text = output_of("show", run.id, "--brief")
    assert MOST_TOKENS - 40 < tokens(text) <= MOST_TOKENS
    lines = told(text)
    assert all(lines[name].endswith("…") for name in ("verdict", "cause", "place", "remedy"))
    assert lines["next"].endswith(f"`memlog compare {run.id} latest`")


def test_a_failed_allocation_has_its_place_and_the_first_advice(tmp_path: Path) -> None:
    made = MadeRun(tmp_path).write(*(batch(step, GIB) for step in range(40)))
    failure = OutOfMemory(
        at(5), 39, "host", 9 * GIB, GIB, 8 * GIB, "the memory", GIB, None, "body.1", "forward", "no"
    )
    run = made.write(failure, End(at(6), "failed")).closed()
    explain_afterwards(run)
    lines = told(output_of("show", run.id, "--brief"))
    assert lines["place"] == "layer body.1, forward pass"
    report = run.artifacts / "postmortem.md"
    assert f"\n- {lines['remedy'].rstrip('…')}" in report.read_text(encoding="utf-8")
    assert lines["next"].startswith(f"read {report}; ")


def test_a_run_without_steps_and_a_run_that_goes_on(tmp_path: Path) -> None:
    MadeRun(tmp_path, "empty234").write(Run(at(0), None, None, (), {})).closed()
    assert "session.step()" in told(output_of("show", "empty234", "--brief"))["next"]
    MadeRun(tmp_path, "alive234", alive=True).write(batch(0, GIB)).closed()
    again = told(output_of("show", "alive234", "--brief"))["next"]
    assert again.startswith("`memlog show alive234 --brief` again")


def test_a_folder_cannot_control_the_terminal(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, "evil\x1b[2J").write(batch(0, GIB))
    made.write(Artifact(at(1), "postmortem.md", "postmortem", "artifacts/postmortem.md", 1))
    made.closed()
    text = output_of("show", "latest", "--brief")
    assert all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("other", ["--all", "--json"])
def test_it_is_one_of_three_views(tmp_path: Path, other: str) -> None:
    finished_run(tmp_path)
    assert "pass one of them" in complaint("show", "latest", "--brief", other, code=2)
