"""Each kind of memory that the helper process samples reaches everything that shows or judges memory."""

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from support.journals import GIB, MIB, MadeRun, at, batch

from memlog._internal.diagnostics import Diagnostics
from memlog.alerts import parse_rule
from memlog.alerts.engine import AlertEngine
from memlog.cli.main import cli
from memlog.errors import ConfigurationError
from memlog.events import SAMPLED, Alert, End, Event, Sample
from memlog.journal import RunDirectory
from memlog.reports import summarize
from memlog.reports.figures import run_figures
from memlog.reports.gates import parse_gate

DOCS = Path(__file__).parents[3] / "docs"
HIGH, LOW = 3 * GIB, 2 * GIB

every_kind = pytest.mark.parametrize("name", SAMPLED)


def sample(name: str, step: int, size: int) -> Sample:
    empty = Sample(at(step / 10), step, None, None, None, None, None)
    return msgspec.structs.replace(empty, **{SAMPLED[name].field: size})


def run_with(root: Path, name: str) -> RunDirectory:
    made = MadeRun(root)
    for step in range(3):
        made.write(batch(step, GIB))
    for step, size in enumerate((LOW + MIB, HIGH, LOW)):
        made.sampled(sample(name, step, size))
    return made.write(End(at(1), "finished")).closed()


@every_kind
def test_it_is_a_metric_with_its_unit(tmp_path: Path, name: str) -> None:
    metrics = summarize(run_with(tmp_path, name)).metrics
    found = metrics[f"memory/{name.replace('.', '/')}_mib"]
    assert (found.min, found.max, found.last) == (LOW / MIB, HIGH / MIB, LOW / MIB)


@every_kind
def test_its_highest_value_is_a_peak_unless_low_values_are_bad(tmp_path: Path, name: str) -> None:
    run = run_with(tmp_path, name)
    is_peak = not SAMPLED[name].is_worst_low
    peaks = summarize(run).peaks
    assert (name in peaks) == is_peak
    if is_peak:
        assert (peaks[name].bytes, peaks[name].step) == (HIGH, 1)
        assert run_figures(run).figures[name] == HIGH
    shown = CliRunner().invoke(cli, ["show", run.id, "--dir", str(tmp_path), "--all"]).output
    hidden = name == "host.cgroup"  # shown only if the group has a limit
    assert (re.search(rf"^ *{name} +3\.0 GiB", shown, re.MULTILINE) is not None) == (
        is_peak and not hidden
    )


@every_kind
def test_a_gate_can_compare_its_peak(name: str) -> None:
    if SAMPLED[name].is_worst_low:
        with pytest.raises(ConfigurationError):
            parse_gate(f"{name} > +5%")
    else:
        assert parse_gate(f"{name} > +5%").figure == name


@every_kind
def test_a_rule_judges_its_samples(name: str) -> None:
    text = f"{name} > 2.5 GiB"
    if not SAMPLED[name].in_rules:
        with pytest.raises(ConfigurationError):
            parse_rule(text)
        return
    found: list[Event] = []
    engine = AlertEngine([parse_rule(text)], found.append, Diagnostics())
    for step, size in enumerate((LOW, LOW, HIGH, LOW)):
        engine(batch(step, 9 * GIB))
        engine(sample(name, step, size))
    [alert] = found
    assert isinstance(alert, Alert)
    assert (alert.step, alert.title) == (2, f"{name} is 3.0 GiB, over 2.5 GiB")


@every_kind
def test_it_is_documented(name: str) -> None:
    kind = SAMPLED[name]
    assert f"memory/{name.replace('.', '/')}_mib`" in (DOCS / "reference/metrics.md").read_text()
    if kind.in_rules:
        assert f"| `{name}` |" in (DOCS / "how-to/set-alerts.md").read_text()
    if not kind.is_worst_low:
        assert f"| `{name}` |" in (DOCS / "show-json.md").read_text()
        assert f"`{name}`" in (DOCS / "compare.md").read_text()
