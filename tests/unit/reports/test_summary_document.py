"""The documents of `memlog show --json` and `memlog runs --json` agree with their page in docs."""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memlog.cli.runs import RunList
from memlog.reports import Summary

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "show-json.md"


def fields(kind: object, prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all fields of a document."""
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        for name in kind.__struct_fields__:
            yield from fields(hints[name], f"{prefix}.{name}" if prefix else name)
    elif typing.get_origin(kind) is dict:
        yield from fields(arguments[1], f"{prefix}.<>")
    elif typing.get_origin(kind) is list and arguments[0] is not str:
        yield from fields(arguments[0], f"{prefix}[]")
    else:
        assert typing.get_origin(kind) in (
            None,
            list,
            typing.Literal,
            typing.Union,
            types.UnionType,
        )
        yield prefix


def documented(text: str) -> set[str]:
    """Return the fields in the page's tables of three columns."""
    names = re.findall(r"^\| `([^`]+)` \| [a-z ]+ \|", text, re.MULTILINE)
    return {re.sub(r"<\w+>", "<>", name) for name in names}


def test_the_documentation_tells_of_every_field_and_of_no_other() -> None:
    of_one_run, of_all = DOCUMENTATION.read_text().split("## `memlog runs --json`")
    assert documented(of_one_run) == set(fields(Summary))
    assert documented(of_all) == set(fields(RunList))


def test_the_fields_are_frozen() -> None:
    """Fields may be added. None may be removed or renamed without a new number in ``schema``."""
    assert set(fields(Summary)) == {
        "schema",
        "status",
        "steps",
        *(f"run.{field}" for field in ("id", "name", "project", "directory", "begun", "ended")),
        *(f"run.{field}" for field in ("newest_event", "duration_s", "host", "pid", "backends")),
        "run.devices.<>.product",
        "run.devices.<>.capacity_bytes",
        "run.parameters.<>",
        *(f"metrics.<>.{field}" for field in ("axis", "first_index", "last_index")),
        *(f"metrics.<>.{field}" for field in ("last", "min", "max")),
        *(f"peaks.<>.{field}" for field in ("bytes", "source", "step", "evaluation")),
        "verdict",
        *(f"findings[].{field}" for field in ("kind", "title", "where", "since_step", "rate")),
        *(
            f"findings[].{field}"
            for field in ("forecast", "evidence", "confidence", "remedy", "step")
        ),
        *(f"alerts[].{field}" for field in ("time", "step", "level", "rule")),
        *(f"alerts[].{field}" for field in ("title", "text", "value", "evaluation", "epoch")),
        *(f"artifacts[].{field}" for field in ("time", "name", "kind", "path", "size_bytes")),
        *(f"scopes.<>.{field}" for field in ("count", "errors", "duration_s")),
        *(f"scopes.<>.rss_change.{which}_bytes" for which in ("last", "largest")),
        *(f"scopes.<>.devices.<>.allocated_change.{which}_bytes" for which in ("last", "largest")),
        *(f"scopes.<>.devices.<>.{field}" for field in ("peak_bytes", "peak_source")),
        "largest_step",
        *(f"phases.<>.{field}" for field in ("count", "errors", "duration_s", "within")),
        *(f"phases.<>.peaks.<>.{which}" for which in ("exact_bytes", "exact_step")),
        *(f"phases.<>.peaks.<>.{which}" for which in ("at_least_bytes", "made_the_peak")),
        "points.<>.count",
        *(f"points.<>.rss.{which}_bytes" for which in ("last", "largest")),
        *(f"points.<>.allocated.<>.{which}_bytes" for which in ("last", "largest")),
        "health.published",
        "health.thinned",
        *(f"health.delivered.<>.{field}" for field in ("points", "stage", "problem")),
        *(
            f"health.delivered.<>.runs[].{field}"
            for field in ("id", "uri", "own", "name", "offset")
        ),
        "health.dropped.<>",
        "health.faults.<>",
        "health.unjudged.<>",
        *(
            f"traced.{field}"
            for field in ("steps", "worst_step", "worst_peak_bytes", "worst_exact", "cost_ms")
        ),
        "traced.set_up_ms",
        "health.overhead_ms_per_step",
        "health.overhead_ms_total",
        "health.journal_queued",
        "omitted.<>",
    }
