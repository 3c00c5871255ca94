"""Damaged journals, from a seed: the same seed gives the same journal."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from memlog.delivery.helper.retention import Retention
from memlog.delivery.uploader.uploader import Uploader
from memlog.errors import TrackerUnavailableError
from memlog.journal import ProcessIdentity, RunDirectory
from memlog.journal.delivery_state import UploadState
from memlog.reports import encode, summarize
from support.commands import memlog
from support.journals import full_run
from support.sinks import ListTracker

_NOBODY = ProcessIdentity(4242, 0.0, "trainer")
_SOURCES: dict[str, bytes] = {}
_VALUES: list[object] = [
    *(None, True, "", "x" * 5000, "\x1b[2J", "../../etc/passwd", [], {}, [[]]),
    *(0, -1, 2**63 - 1, 2**63, 10**400, 0.1, 1e308, -0.0),
]
_LITERALS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"\xff"', b"[" * 3000, b'{"a":' * 500)


def fuzzed_run(root: Path, seed: int) -> RunDirectory:
    """Return a run with events of every kind, whose files were then damaged."""
    source = _source(root.parent)
    run = RunDirectory(root / "k7m2xq9a")
    run.delivery.mkdir(parents=True)
    chance = random.Random(seed)  # noqa: S311 - damage, not secrets
    for name, data in source.items():
        damaged = data
        for _ in range(chance.choice((0, 1, 1, 2, 5))):
            damaged = chance.choice(_DAMAGES)(damaged, chance)
        if chance.random() < 0.95:
            (run.path / name).write_bytes(damaged)
            os.utime(run.path / name, (0, 0))  # written on another machine, long ago
    state = json.dumps(_state(chance)).encode()
    (run.delivery / "list.json").write_bytes(chance.choice(_DAMAGES)(state, chance))
    return run


def read_damaged_run(root: Path, seed: int) -> None:
    """Read a damaged run in every way in which memlog reads runs."""
    run = fuzzed_run(root, seed)
    json.loads(encode(summarize(run)))
    tracker = ListTracker()
    uploader = Uploader(run, "list", tracker.open_sink, may_open_own=True)
    try:
        uploader.deliver(complete=True)
        uploader.close()
    except TrackerUnavailableError as error:
        raise AssertionError(
            f"seed {seed}: a damaged journal holds delivery up: {error}"
        ) from error
    assert UploadState.load(run, "list").backend == "list"
    retention = Retention(run, 4096, ("list",))
    for _ in range(200):
        if not retention.enforce():
            break
    json.loads(encode(summarize(run)))
    for arguments in (["show", "k7m2xq9a"], ["show", "k7m2xq9a", "--json"], ["runs"]):
        result = memlog(*arguments, "--dir", str(root))
        assert result.exception is None or isinstance(result.exception, SystemExit), (seed, result)
        assert result.exit_code in (0, 1, 3), (seed, result.output)
        assert "Traceback" not in result.output
        assert "\x1b" not in result.output


def _source(root: Path) -> dict[str, bytes]:
    if not _SOURCES:
        # This machine's own names and numbers change the lengths of lines. A seed would damage other places.
        with patch.object(ProcessIdentity, "own", return_value=_NOBODY):
            run = full_run(root / "source").closed()
        segments = sorted(run.path.glob("*.jsonl"))
        _SOURCES.update({path.name: path.read_bytes() for path in segments})
    return _SOURCES


def _state(chance: random.Random) -> dict[str, object]:
    process = chance.choice([name.rsplit("-", 1)[0] for name in _SOURCES])
    position = [chance.randrange(-2, 12), chance.randrange(-10, 10_000)]
    return {
        "backend": "list",
        "files": {process: {"sent": position, "resume": position, "open": {"step": position}}},
        "delivered": chance.choice(_VALUES[:6]),
    }


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _flip(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.randrange(1, 20)):
        if damaged:
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged)


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    garbage = chance.choice((chance.randbytes(200), b"\0" * 4096, b"\n" * 50, b"x" * (2 * 1024**2)))
    return data[:at] + garbage + data[at:]


def _line(data: bytes, chance: random.Random) -> bytes:
    """Damage a line: a value of a wrong type, a literal that is no JSON, or another event's tag."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        record = json.loads(lines[at])
        inner = record[1] if isinstance(record, list) else record
        key = chance.randrange(len(inner)) if isinstance(inner, list) else chance.choice([*inner])
        inner[key] = "HERE" if chance.random() < 0.4 else chance.choice(_VALUES)
        literal = chance.choice(_LITERALS)
        lines[at] = json.dumps(record).encode().replace(b'"HERE"', literal)
    except (ValueError, LookupError, TypeError, RecursionError):
        lines[at] = lines[at][::-1]
    return b"\n".join(lines)


def _compaction(data: bytes, chance: random.Random) -> bytes:
    """Write wrong data about a compaction into a segment: into its header, and into the line of a gap."""
    begins = chance.choice((-5, 0, 10**9, 2**63 - 1))
    gap = chance.choice((-1, 0, 10**18, 2**63 - 1, "x"))
    head, _, rest = data.partition(b"\n")
    head = (
        head[:-1] + b',"compaction":' + json.dumps([{"window": 1, "begins": begins}])[1:-1].encode()
    )
    line = json.dumps({"events": gap, "delivered": 0, "bytes": gap}).encode()
    return head + b"}\n" + line + b"\n" + rest


def _shuffle(data: bytes, chance: random.Random) -> bytes:
    head, _, rest = data.partition(b"\n")
    lines = rest.split(b"\n")
    chance.shuffle(lines)
    return b"\n".join([head, *lines])


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_cut, _flip, _insert, _line, _line, _line, _compaction, _shuffle),
)
