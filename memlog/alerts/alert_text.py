"""Text of an alert about one of the user's rules, as the terminal and the trackers show it."""

from __future__ import annotations

from memlog._internal.units import format_bytes
from memlog.alerts.rules import Rule

_COMPARISONS = {">": "over", ">=": "at least", "<": "under", "<=": "at most"}


def alert_title(rule: Rule, subject: str, value: float, limit: int | None) -> str:
    """Return one line, such as "host.rss is 314.7 MiB, over 300 MiB for 5 steps".

    ``limit`` is the number of bytes to which ``%`` in the rule refers. It may be ``None`` if the rule's
    amount has no ``%``.
    """
    verb = "is" if rule.growth is None else "grows"
    shown = f"{value:.2f}" if rule.figure == "device.fragmentation" else format_bytes(value)
    per = "" if rule.growth is None else f" per {rule.growth}"
    amount = rule.amount_text + (f" of {format_bytes(limit)}" if rule.share else "")
    held = f" for {rule.hold} {rule.held_axis}s" if rule.hold > 1 else ""
    comparison = _COMPARISONS[rule.comparison]
    return f"{subject}.{rule.attribute} {verb} {shown}{per}, {comparison} {amount}{held}"
