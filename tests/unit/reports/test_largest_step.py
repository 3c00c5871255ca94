"""The sentences on the inputs of the largest step and of the one that failed."""

from pathlib import Path

import msgspec
import pytest
from support.journals import MIB, MadeRun, at, batch

from memlog.events import Event, OutOfMemory, StepInputs, TensorInput, Trace
from memlog.facts.levels import Peak
from memlog.reports.final_state import final_state, of_the_end, role, shapes
from memlog.reports.oom_diagnosis import Witness
from memlog.reports.postmortem import report
from memlog.reports.schema import LargestStep
from memlog.reports.summary import summarize

TOKENS = TensorInput('batch["input_ids"]', (8, 1024), "int64")
LARGEST = StepInputs(at(5), 5, "host", 900 * MIB, (TOKENS,))
FAILURE = OutOfMemory(
    at(9), 9, "host", MIB, 0, None, None, None, None, None, "backward", "gone", inputs=(TOKENS,)
)


def traced(step: int) -> Trace:
    return Trace(at(step), step, "dispatch", True, 80 * MIB, {}, (), 0)


def sentences_on(root: Path, *events: Event) -> list[str]:
    """Sentences on a run of ten steps, the fifth with 900 MiB."""
    steps = [
        msgspec.structs.replace(
            batch(step, 300 * MIB),
            rss_peak=(900 if step >= 5 else 400) * MIB,
            rss_peak_source="exact",
        )
        for step in range(10)
    ]
    in_order = sorted([*steps, *events], key=lambda event: event.time_us)
    return list(of_the_end(final_state(MadeRun(root).write(*in_order).closed())))


def test_names_and_shapes() -> None:
    many = [TensorInput(f"x{at}", (at, 2), "float32") for at in range(6)]
    assert shapes(many).split(", ")[-1] == "2 more"
    assert shapes([TOKENS]).replace("\N{MULTIPLICATION SIGN}", "x") == '`batch["input_ids"]` 8x1024'


def test_the_largest_step_beside_the_traced_one(tmp_path: Path) -> None:
    (line,) = sentences_on(tmp_path, traced(2), LARGEST)
    assert line.startswith(
        "The process's peak rose to 900.0 MiB in step 5, whose inputs were `batch"
    )
    assert line.endswith(
        "That is at least 500.0 MiB more than in step 2, the newest traced one. Step 5 was not traced."
    )


@pytest.mark.parametrize(
    ("step", "end"),
    [(5, "This step was traced."), (8, "Step 5 was not traced."), (None, "8×1024.")],  # noqa: RUF001
)
def test_whether_it_was_traced(tmp_path: Path, step: int | None, end: str) -> None:
    (line,) = sentences_on(tmp_path, LARGEST, *([] if step is None else [traced(step)]))
    assert line.endswith(end)


def test_inputs_that_do_not_explain_it(tmp_path: Path) -> None:
    (line,) = sentences_on(tmp_path, msgspec.structs.replace(LARGEST, like_step=3))
    assert "Step 3 had inputs of the same shapes and a lower peak" in line


def test_the_report_has_them(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).write(batch(9, 300 * MIB), LARGEST, FAILURE).closed()
    text = report(final_state(run), Witness(writer="helper")).text
    assert "## Inputs\n\nInputs of the step that failed:" in text


def largest(root: Path, *peaks: int) -> tuple[LargestStep | None, dict[str, Peak]]:
    """Return the largest step, and the peaks, of a run with these peaks in MiB. `LARGEST` is at step 5."""
    steps = [
        msgspec.structs.replace(
            batch(step, 300 * MIB), rss_peak=peak * MIB, rss_peak_source="exact"
        )
        for step, peak in enumerate(peaks)
    ]
    in_order = sorted([*steps, LARGEST], key=lambda event: event.time_us)
    found = summarize(MadeRun(root).write(*in_order).closed())
    return found.largest_step, found.peaks


def test_the_step_of_the_peak(tmp_path: Path) -> None:
    found, peaks = largest(tmp_path, *[400] * 5, *[900] * 4)
    assert found is not None
    assert role(found, peaks) == "made the peak"


def test_a_later_step_with_a_slightly_higher_peak(tmp_path: Path) -> None:
    found, peaks = largest(tmp_path, *[400] * 5, *[900] * 2, *[910] * 2)
    assert found is not None
    assert role(found, peaks) == "came within 10.0 MiB of the peak"


def test_a_peak_before_the_step_is_not_the_steps(tmp_path: Path) -> None:
    found, _ = largest(tmp_path, *[400] * 4, *[900] * 5)
    assert found is None


def test_a_later_peak_that_is_much_higher(tmp_path: Path) -> None:
    found, _ = largest(tmp_path, *[400] * 5, *[900] * 2, *[990] * 2)
    assert found is None
