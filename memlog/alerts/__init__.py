"""Threshold alerts: rules as text.

`memlog.alerts.engine` judges events by them. The training process does not import it.
"""

from memlog.alerts.rules import Rule, parse_rule, parse_rules

__all__ = ["Rule", "parse_rule", "parse_rules"]
