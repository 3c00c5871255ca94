"""The document of `memlog show --json` keeps its fields."""

import types
import typing
from collections.abc import Iterator

import msgspec

from memlog.reports import Summary


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


def test_the_fields_are_frozen() -> None:
    """Fields may be added. None may be removed or renamed without a new number in ``schema``."""
    named = {
        "": "schema status steps verdict largest_step longest_batch first_step last_step outcome "
        "host_limit_bytes cgroup_limit_bytes failed_rank survived_failures survived_first_step "
        "survived_last_step survived_batch_sizes[] saving_is_partial "
        "failed_at",
        "saving[].": "way host host_most device",
        "run.": "id name project directory begun ended newest_event duration_s host pid backends",
        "run.devices.<>.": "product capacity_bytes shares_host",
        "run.parameters.": "<>",
        "metrics.<>.": "axis first_index last_index last min max",
        "peaks.<>.": "bytes source step evaluation after_step",
        "findings[].": "kind title where since_step rate forecast evidence confidence remedy step rank",
        "alerts[].": "time step level rule title text value evaluation epoch",
        "artifacts[].": "time name kind path size_bytes",
        "scopes.<>.": "count errors duration_s",
        "scopes.<>.rss_change.": "last_bytes largest_bytes",
        "scopes.<>.devices.<>.": "peak_bytes peak_source",
        "scopes.<>.devices.<>.allocated_change.": "last_bytes largest_bytes",
        "phases.<>.": "count errors duration_s within",
        "phases.<>.peaks.<>.": "exact_bytes exact_step at_least_bytes made_the_peak",
        "points.<>.": "count",
        "points.<>.rss.": "last_bytes largest_bytes",
        "points.<>.allocated.<>.": "last_bytes largest_bytes",
        "traced.": "steps worst_step worst_peak_bytes worst_exact worst_cut worst_device cost_ms set_up_ms "
        "untraced",
        "health.": "published thinned overhead_ms_per_step overhead_ms_total journal_queued",
        "health.delivered.<>.": "points stage problem",
        "health.delivered.<>.runs[].": "id uri own name offset",
        "health.dropped.": "<>",
        "health.faults.": "<>",
        "health.unjudged.": "<>",
        "omitted.": "<>",
    }
    assert set(fields(Summary)) == {
        prefix + name for prefix, names in named.items() for name in names.split()
    }
