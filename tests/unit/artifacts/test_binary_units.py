"""Conversion of bytes for speedscope's page: exact MiB, and a name that says MiB."""

import json
from typing import Any

import pytest
from support.flamegraphs import document, evented, sampled

from memlog.artifacts.server import check_flamegraph, in_binary_units


def shown(*profiles: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = in_binary_units(json.dumps({**document(*profiles), **fields}).encode(), "a.json")
    check_flamegraph(content)
    decoded: dict[str, Any] = json.loads(content)
    return decoded


def test_bytes_become_mib() -> None:
    of_bytes, of_time = shown()["profiles"]
    assert of_bytes["weights"] == [1, 2, 4]
    assert (of_bytes["endValue"], of_bytes["unit"]) == (7, "none")
    assert of_bytes["name"] == "live bytes at the peak (in MiB)"
    assert of_time == evented()


def test_less_than_one_mib_is_shown_in_kib() -> None:
    small = {**sampled(), "weights": [512, 512, 1024], "endValue": 2048}
    (profile,) = shown(small)["profiles"]
    assert profile["weights"] == [0.5, 0.5, 1]
    assert profile["name"].endswith("(in KiB)")


def test_a_few_bytes_stay_bytes() -> None:
    tiny = {**sampled(), "weights": [1, 2, 3], "endValue": 6}
    assert shown(tiny)["profiles"] == [tiny]


def test_events_in_bytes_are_scaled_too() -> None:
    events = [{**event, "at": event["at"] * 2**20} for event in evented()["events"]]
    (profile,) = shown({**evented(), "unit": "bytes", "endValue": 10 * 2**20, "events": events})[
        "profiles"
    ]
    assert [event["at"] for event in profile["events"]] == [0, 1, 4, 10]
    assert profile["endValue"] == 10


@pytest.mark.parametrize(
    ("name", "title"), [("step 100", "step 100"), (None, "a.json"), ("", "a.json")]
)
def test_a_file_without_a_title_gets_its_name(name: str | None, title: str) -> None:
    assert shown(name=name)["name"] == title


@pytest.mark.parametrize("number", ["9" * 5000, "1e999"])
def test_a_number_too_large_in_a_field_that_nobody_reads_changes_nothing(number: str) -> None:
    content = json.dumps(document()).replace("{", f'{{"x": {number}, ', 1).encode()
    check_flamegraph(content)
    assert in_binary_units(content, "a.json") == content
