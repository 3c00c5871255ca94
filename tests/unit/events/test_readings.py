"""Readings: what an event says about memory, by name."""

import msgspec
import pytest
from support.journals import GIB, cuda

from memlog.events import (
    EVENT_TYPES,
    SAMPLED,
    Batch,
    DeviceUse,
    Epoch,
    Evaluation,
    Event,
    Phase,
    PinnedMemory,
    Recorded,
    Sample,
    Scope,
    ThreadStep,
    changes,
    main_reading,
    main_readings,
    peak_readings,
    readings,
)

DEVICES = (cuda(3, 5), cuda(4, 9, 1))
BATCH = Batch(1, 7, 10, 12, "exact", DEVICES, 8, 2)
MEASURED: dict[type, Event] = {
    Batch: BATCH,
    Epoch: Epoch(1, 0, 7, 10, 12, "exact", DEVICES),
    Phase: Phase(1, "p", (), 5, 10, 12, "exact", DEVICES),
    Evaluation: Evaluation(1, 0, 0.5, 10, DEVICES),
    Recorded: Recorded(1, "r", 10, DEVICES),
}


def test_a_step_has_the_readings_of_the_host_and_then_of_each_device() -> None:
    assert [(each.name, each.level, each.peak, each.source) for each in readings(BATCH)] == [
        ("host.rss", 10, 12, "exact"),
        ("host.anon", 8, None, None),
        ("shared_memory", 2, None, None),
        ("cuda0.allocated", 3, 5, "exact"),
        ("cuda0.reserved", 6, None, None),
        ("cuda1.allocated", 4, 9, "exact"),
        ("cuda1.reserved", 8, None, None),
    ]
    assert [each.owner for each in readings(BATCH)] == ["host"] * 3 + ["cuda0"] * 2 + ["cuda1"] * 2


@pytest.mark.parametrize("kind", MEASURED)
def test_every_measured_event_has_the_same_main_readings(kind: type) -> None:
    event = MEASURED[kind]
    host, *devices = main_readings(event)
    assert [each.name for each in (host, *devices)] == [
        "host.rss",
        "cuda0.allocated",
        "cuda1.allocated",
    ]
    assert (host.level, devices[1].level, devices[1].peak) == (10, 4, 9)
    assert main_reading(event, "cuda1") == devices[1]
    assert main_reading(event, "host") == host
    assert main_reading(event, "cuda7") is None
    assert [each for each in readings(event) if each in (host, *devices)] == [host, *devices]


def test_no_event_with_memory_of_the_process_is_left_out() -> None:
    with_memory = {kind for kind in EVENT_TYPES if "rss" in kind.__struct_fields__}
    assert with_memory - {ThreadStep} == MEASURED.keys()
    assert not list(readings(ThreadStep(1, "mlflow", "r", None, 7, 10)))


def test_the_peaks_of_devices_are_preferred_if_one_is_known() -> None:
    unknown = msgspec.structs.replace(DEVICES[0], peak=None, peak_source=None)
    for devices, owners in (
        (DEVICES, ["cuda0", "cuda1"]),
        ((unknown, DEVICES[1]), ["cuda1"]),
        ((unknown,), ["host"]),
        ((), ["host"]),
    ):
        event = msgspec.structs.replace(BATCH, devices=devices)
        assert [each.owner for each in peak_readings(event)] == owners


def test_a_watched_block_has_changes_and_no_readings() -> None:
    block = Scope(1, "b", 5, -3, DEVICES)
    assert list(readings(block)) == []
    assert [(each.owner, each.level, each.peak) for each in changes(block)] == [
        ("host", -3, None),
        ("cuda0", 3, 5),
        ("cuda1", 4, 9),
    ]


def test_a_sample_has_each_sampled_kind_and_the_use_of_devices() -> None:
    sizes = {kind.field: GIB + number for number, kind in enumerate(SAMPLED.values())}
    empty = Sample(1, 7, None, None, None, None, None, devices=(DeviceUse("cuda0", 5, None),))
    sample = msgspec.structs.replace(empty, **sizes)
    assert {each.name: each.level for each in readings(sample)} == {
        **{name: sizes[kind.field] for name, kind in SAMPLED.items()},
        "cuda0.device_used": 5,
        "cuda0.other": None,
        "cuda0.other_processes": None,
    }
    assert {each.owner for each in readings(sample)} == {"host", "cuda0"}


def test_pinned_memory_has_a_level_with_a_peak_and_a_part_in_use() -> None:
    found = readings(PinnedMemory(1, 7, 6, 4, 9, "exact"))
    assert [(each.name, each.level, each.peak, each.source) for each in found] == [
        ("host.pinned", 6, 9, "exact"),
        ("host.pinned_in_use", 4, None, None),
    ]
