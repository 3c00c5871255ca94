"""Threshold alerts: rules as text, and the subscriber that judges events by them."""

from memlog.alerts.engine import AlertEngine, engine_for
from memlog.alerts.rules import Rule, parse_rule, parse_rules

__all__ = ["AlertEngine", "Rule", "engine_for", "parse_rule", "parse_rules"]
