"""Phases: nested, ended also by an exception, each with its own peak, and the user's counters unchanged."""

from typing import Any

import pytest
import torch
from support.events import recorded
from support.torch_double import Devices, nested

import memlog
from memlog.events import Batch, Phase, Scope
from memlog.journal import RunDirectory
from memlog.metrics import values
from memlog.reports.summary import summarize

MIB = 2**20


pytestmark = pytest.mark.usefixtures("runs")


class Allocator(Devices):
    """CUDA's counters at torch's interface; a reset is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__({})
        self.current = self.peak = 0
        for name in (
            *("is_initialized", "device_count", "current_device"),
            *("get_allocator_backend", "get_device_properties"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.refuse)
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", self.nested_stats, raising=False)

    def refuse(self, *_: object) -> None:
        raise AssertionError("memlog reset the user's peak")

    def nested_stats(self, _index: int) -> dict[Any, Any]:
        return nested(self.current, self.current, self.peak)

    def uses(self, mib: int) -> None:
        self.current += mib * MIB
        self.peak = max(self.peak, self.current)

    def frees(self, mib: int) -> None:
        self.current -= mib * MIB


def test_nested_phases_have_their_labels_and_durations() -> None:
    session = memlog.init("local")
    with memlog.phase("learn"):
        with memlog.phase("advantages"):
            pass
        session.step()
    inner, outer = recorded(session, Phase)
    assert (inner.label, inner.within, outer.label, outer.within) == (
        "advantages", ("learn",), "learn", (),
    )  # fmt: skip
    assert 0 <= inner.duration_us <= outer.duration_us
    assert (inner.step, outer.step) == (0, 0)
    assert outer.rss is not None
    assert outer.highest["host"] >= outer.rss


def test_no_label_has_a_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "Zx9qPlmKw27TrVbn8")
    session = memlog.init("local")
    with memlog.phase("with Zx9qPlmKw27TrVbn8"), memlog.phase("inner"):
        session.step()
    with memlog.track_memory("block Zx9qPlmKw27TrVbn8"):
        pass
    inner, outer = recorded(session, Phase)
    assert (inner.within, outer.label) == (("with ***",), "with ***")
    assert [scope.label for scope in recorded(session, Scope)] == ["block ***"]
    assert "[Memory] block ***:" in capsys.readouterr().out


def test_a_phase_ends_also_if_it_raises() -> None:
    session = memlog.init("local")
    with pytest.raises(ZeroDivisionError), memlog.phase("rollout"), memlog.phase("inner"):
        raise ZeroDivisionError
    assert [(each.label, each.error) for each in recorded(session, Phase)] == [
        ("inner", "ZeroDivisionError"),
        ("rollout", "ZeroDivisionError"),
    ]


def test_hooks_in_pairs_end_what_is_open_within() -> None:
    session = memlog.init("local")
    session.end_phase("validation")  # without a begin
    session.begin_phase("validation")
    session.begin_phase("batch")
    session.end_phase("validation")
    session.end_phase("batch")
    assert [each.label for each in recorded(session, Phase)] == ["batch", "validation"]


def test_a_phase_that_is_open_at_the_end_is_recorded() -> None:
    session = memlog.init("local")
    session.begin_phase("rollout")
    memlog.finish()
    assert [each.label for each in recorded(session, Phase)] == ["rollout"]


def test_without_a_session_a_phase_does_nothing() -> None:
    with memlog.phase("rollout"):
        pass
    memlog.init("local", enabled=False)
    with memlog.phase("rollout"):
        pass


def test_each_phases_peak_is_exact_if_the_counter_rose_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Allocator(monkeypatch)
    session = memlog.init("local")
    device.uses(10)
    with memlog.phase("rollout"):
        device.uses(20)
        device.frees(20)
    with memlog.phase("learn"):
        with memlog.phase("advantages"):
            device.uses(5)
        with memlog.phase("update"):
            device.uses(40)
            device.frees(40)
        device.frees(5)
    with memlog.phase("rollout"):
        device.uses(20)
        session.step()
        device.frees(20)
    found = recorded(session, Phase)
    assert [
        (each.label, each.devices[0].peak_source, (each.devices[0].peak or 0) // MIB)
        for each in found
    ] == [
        ("rollout", "exact", 30),
        ("advantages", "watermark", 30),
        ("update", "exact", 55),
        ("learn", "exact", 55),
        ("rollout", "watermark", 55),
    ]
    assert [each.highest["cuda0"] // MIB for each in found] == [10, 15, 15, 15, 30]
    assert device.peak == 55 * MIB  # never reset: `refuse` raises

    names = [{value.name for value in values(each)} for each in found]
    peak = "memory/phase/{}/cuda0/peak_mib"
    assert peak.format("update") in names[2]
    assert peak.format("rollout") in names[0]
    assert peak.format("rollout") not in names[4]  # an upper bound would be another phase's peak

    memlog.finish()
    assert session.directory is not None
    facts = summarize(RunDirectory(session.directory)).phases
    assert list(facts) == ["rollout", "learn", "advantages", "update"]
    assert [facts[label].peaks["cuda0"].made_the_peak for label in facts] == [
        False, False, False, True,
    ]  # fmt: skip
    assert facts["advantages"].peaks["cuda0"].exact_bytes is None
    assert facts["advantages"].peaks["cuda0"].at_least_bytes == 15 * MIB


def test_a_phase_before_the_first_step_is_on_the_step_axis() -> None:
    session = memlog.init("local", initial_step=7)
    with memlog.phase("sanity"):
        pass
    session.step()
    with memlog.phase("train"):
        session.step()
    assert [each.step for each in recorded(session, Phase)] == [7, 8]
    assert [each.step for each in recorded(session, Batch)] == [7, 8]
