"""Formats of ``memlog compare`` for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from support.commands import memlog
from support.journals import GIB, MIB, MadeRun, at, batch

from memlog.events import End, Run, Trace, TracedLayer

pytestmark = pytest.mark.usefixtures("plain_environment")
GATES = ("trace.peak > +5%", "host.rss > 2 GiB", "device.peak > 1 GiB")
"""Gates that fail, pass, and can't be judged."""


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run_id, peak, name in (("aaaa2222", 100, "tiny"), ("bbbb2222", 110, "tiny")):
        layers = (
            TracedLayer("head|*", peak * MIB // 2, 1, 1, peak * MIB),
            TracedLayer("body", MIB, 1, 1, 1),
        )
        at_peak = {"activations": (peak - 1) * MIB, "parameters": MIB}
        MadeRun(tmp_path, run_id).write(
            Run(at(0), name, None, (), {}),
            batch(0, GIB),
            Trace(at(1), 3, "dispatch", True, peak * MIB, at_peak, layers, 0),
            End(at(9), "finished"),
        ).closed()


def printed(layout: str, *runs: str, gates: tuple[str, ...] = GATES) -> str:
    conditions = [word for gate in gates for word in ("--fail-if", gate)]
    result = memlog("compare", *runs, "--format", layout, *conditions)
    assert result.exit_code == (1 if gates else 0), result.output
    return result.stdout


def test_a_comment_shows_the_gates_and_what_changed() -> None:
    assert printed("markdown", "aaaa", "bbbb").splitlines() == [
        "**Gates: 1 failed, 1 could not be judged, 1 passed**",
        "",
        "- ❌ the gate 'trace.peak > +5%' failed: run bbbb2222 has 110.0 MiB against 100.0 MiB (+10.0 %)",
        "- ✅ the gate 'host.rss > 2 GiB' passed: run bbbb2222 has 1.0 GiB",
        "- ❌ the gate 'device.peak > 1 GiB' can't be judged: device.peak is unknown in run bbbb2222",
        "",
        "| figure | aaaa2222 tiny | bbbb2222 tiny | change |",
        "| --- | --: | --: | --: |",
        "| host.rss | 1.0 GiB | 1.0 GiB | 0 |",
        "| trace.peak | 100.0 MiB | 110.0 MiB | +10.0 MiB (+10.0 %) |",
        "",
        "| at the traced peak | aaaa2222 tiny | bbbb2222 tiny | change |",
        "| --- | --: | --: | --: |",
        "| activations | 99.0 MiB | 109.0 MiB | +10.0 MiB (+10.1 %) |",
        "",
        "| layer | aaaa2222 tiny | bbbb2222 tiny | change |",
        "| --- | --: | --: | --: |",
        "| head\\|\\* | 50.0 MiB | 55.0 MiB | +5.0 MiB (+10.0 %) |",
    ]


def test_a_comment_says_that_nothing_changed() -> None:
    lines = printed("markdown", "aaaa", "aaaa", gates=()).splitlines()
    assert lines[-1] == "No category and no layer changed."
    assert not any(line.startswith("| activations") for line in lines)


def test_names_can_not_change_a_comment(tmp_path: Path) -> None:
    evil = "<b>x</b> @owner [a](http://b)\n# c"
    MadeRun(tmp_path, "cccc2222").write(Run(at(0), evil, None, (), {}), batch(0, GIB)).closed()
    head = printed("markdown", "aaaa", "cccc", gates=()).splitlines()[0]
    assert "&lt;b>x&lt;/b> &#64;owner \\[a\\](http://b) \\# c" in head


def test_a_gate_is_an_annotation_on_github() -> None:
    assert printed("github", "aaaa", "bbbb").splitlines() == [
        "::error title=memlog trace.peak::the gate 'trace.peak > +5%25' failed: run bbbb2222 has 110.0 MiB "
        "against 100.0 MiB (+10.0 %25)",
        "::notice title=memlog host.rss::the gate 'host.rss > 2 GiB' passed: run bbbb2222 has 1.0 GiB",
        "::error title=memlog device.peak::the gate 'device.peak > 1 GiB' can't be judged: device.peak is "
        "unknown in run bbbb2222",
    ]


def test_sarif_has_a_result_for_each_gate_that_did_not_pass() -> None:
    memlog("compare", "memory.json", "aaaa", "--update")
    document = json.loads(printed("sarif", "memory.json", "bbbb"))
    assert document["version"] == "2.1.0"
    [run] = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "memlog"
    assert [rule["id"] for rule in driver["rules"]] == ["device.peak", "trace.peak"]
    assert [result["ruleId"] for result in run["results"]] == ["trace.peak", "device.peak"]
    assert {result["level"] for result in run["results"]} == {"error"}
    place = run["results"][0]["locations"][0]["physicalLocation"]
    line = place["region"]["startLine"]
    assert place["artifactLocation"]["uri"] == "memory.json"
    assert Path("memory.json").read_text().splitlines()[line - 1].strip() == '"tiny": {'
    assert "failed: run bbbb2222 has" in run["results"][0]["message"]["text"]
    [run] = json.loads(printed("sarif", "aaaa", "bbbb"))["runs"]
    assert [result["locations"] for result in run["results"]] == [[], []]


def test_junit_has_a_case_for_each_gate() -> None:
    suites = fromstring(printed("junit", "aaaa", "bbbb"))  # noqa: S314 - memlog wrote it
    [suite] = suites
    assert suite.attrib == {"name": "memlog", "tests": "3", "failures": "1", "errors": "1"}
    assert [case.get("name") for case in suite] == list(GATES)
    assert [[child.tag for child in case] for case in suite] == [["failure"], [], ["error"]]
    failure = suite[0][0].get("message")
    assert failure is not None
    assert failure.startswith("the gate 'trace.peak > +5%' failed: run bbbb2222 has 110.0 MiB")


def test_json_is_a_format_like_the_others() -> None:
    assert (
        printed("json", "aaaa", "bbbb")
        == memlog(
            "compare", "aaaa", "bbbb", "--json", *(w for g in GATES for w in ("--fail-if", g))
        ).stdout
    )
    assert memlog("compare", "aaaa", "bbbb", "--format", "html").exit_code == 2
