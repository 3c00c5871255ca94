"""Watermark of a process that another one started or forked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from memlog._internal.terminal import MIB

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="how Linux passes watermarks on"),
]

HELD = 400 * MIB

LAUNCHER = f"""
import subprocess, sys
held = b"x" * {HELD}
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""

TRAINER = f"""
import json, resource
from memlog._internal.diagnostics import Diagnostics
from memlog.probes.process import HostProbe
probe = HostProbe(Diagnostics())
printed = {{"kernel": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}}
printed["first"] = probe.read()
small = b"x" * (100 << 20)
printed["grown"] = probe.read()
del small
printed["shrunk"] = probe.read()
large = b"x" * {HELD + 100 * MIB}
printed["outgrown"] = probe.read()
print(json.dumps(printed))
"""

FORKED = """
import json, os, sys
from memlog._internal.diagnostics import Diagnostics
from memlog.probes.process import HostProbe
probe = HostProbe(Diagnostics())
passed = b"x" * (100 << 20)
del passed
parent = probe.read()
read_end, write_end = os.pipe()
if os.fork() == 0:
    first = probe.read()
    own = b"x" * (50 << 20)
    os.write(write_end, json.dumps([first, probe.read()]).encode())
    os._exit(0)
os.wait()
first, grown = json.loads(os.read(read_end, 4096))
print(json.dumps({"parent": parent, "first": first, "grown": grown, "after": probe.read()}))
"""


def printed_by(*arguments: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout)


def test_a_child_does_not_take_its_launchers_watermark_for_its_own() -> None:
    printed = printed_by(LAUNCHER, TRAINER)

    # If this fails, children no longer inherit the watermark, and the test shows nothing.
    assert printed["kernel"] > HELD
    rss, peak, source, *_ = printed["first"]
    assert rss <= peak < 100 * MIB
    assert source == "watermark"

    rss, peak, source, *_ = printed["grown"]
    assert 100 * MIB < rss <= peak < 250 * MIB
    assert source == "exact"

    rss, peak, source, *_ = printed["shrunk"]
    assert rss < 100 * MIB < peak < 250 * MIB
    assert source == "watermark"

    rss, peak, source, *_ = printed["outgrown"]
    assert HELD + 100 * MIB < rss <= peak < HELD + 250 * MIB
    assert source == "exact"


def test_a_forked_child_reads_itself_and_not_its_parent() -> None:
    printed = printed_by(FORKED)

    parent_rss, parent_peak, *_ = printed["parent"]
    assert parent_rss < 100 * MIB < parent_peak
    first_rss, first_peak, source, *_ = printed["first"]
    assert first_rss < 100 * MIB
    assert first_peak < 100 * MIB
    assert source == "watermark"
    grown_rss, grown_peak, source, *_ = printed["grown"]
    assert grown_rss > first_rss + 45 * MIB
    assert grown_peak >= grown_rss
    assert source == "exact"
    assert printed["after"][0] == pytest.approx(parent_rss, abs=16 * MIB)
    assert printed["after"][1] == parent_peak
