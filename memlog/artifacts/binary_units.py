"""Show a speedscope file's bytes in MiB.

For the unit ``bytes``, speedscope writes "MB" for 1024² bytes, but places the ticks of its scale at decimal
numbers of bytes. For example, the label of the tick at 10,000,000 bytes is 9.54 MB. If numbers have no unit,
speedscope does not convert them. So memlog converts the numbers to MiB, removes the unit, and adds "in MiB"
to the profile's name. Only speedscope's page gets the converted numbers. The file on the disk stays the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memlog._internal.units import MIB

_KIB = 1024


def in_binary_units(content: bytes, title: str) -> bytes:
    """Return a file with its profiles converted from bytes to MiB.

    A profile of less than 1 MiB is converted to KiB. A profile of less than 1 KiB is not converted. A file
    without a title gets ``title``. `memlog.artifacts.flamegraph.check` must have accepted ``content``.
    """
    try:
        document = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return content  # a field that speedscope ignores has a number that is too large
    document["name"] = document.get("name") or title
    document["profiles"] = [_scaled(profile) for profile in document["profiles"]]
    return msgspec.json.encode(document)


def _scaled(profile: dict[str, Any]) -> dict[str, Any]:
    span = profile["endValue"] - profile["startValue"]
    if profile["unit"] != "bytes" or span < _KIB:
        return profile
    divisor, unit = (MIB, "MiB") if span >= MIB else (_KIB, "KiB")
    # Division by a power of two is exact.
    scaled = {
        **profile,
        "name": f"{profile['name']} (in {unit})",
        "unit": "none",
        "startValue": profile["startValue"] / divisor,
        "endValue": profile["endValue"] / divisor,
    }
    if profile["type"] == "sampled":
        scaled["weights"] = [weight / divisor for weight in profile["weights"]]
    else:
        scaled["events"] = [{**event, "at": event["at"] / divisor} for event in profile["events"]]
    return scaled
