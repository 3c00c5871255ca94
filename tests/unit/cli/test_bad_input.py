"""Any input is read, or refused in one clear line; nothing is written elsewhere."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import read_damaged_run

from memlog._internal.diagnostics import Diagnostics
from memlog.delivery.helper.protocol import decode
from memlog.errors import ConfigurationError, RunNotFoundError
from memlog.journal import JournalWriter, RunDirectory, find_run, new_run
from memlog.journal.artifacts import keep
from memlog.settings import Settings, resolve

FUZZED = 60


@pytest.mark.parametrize("part", range(6))
@pytest.mark.slow
def test_a_damaged_run_breaks_nothing(tmp_path: Path, part: int) -> None:
    for seed in range(part * FUZZED // 6, (part + 1) * FUZZED // 6):
        root = tmp_path / "runs" / str(seed)
        read_damaged_run(root, seed)
        assert {path.name for path in root.iterdir()} == {"k7m2xq9a"}
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = st.sampled_from([*Settings.__struct_fields__, "backend", "dir", "enable_memory_monitoring"])


@settings(max_examples=400)
@given(st.dictionaries(KEYS | st.text(max_size=8), ANYTHING, max_size=4), st.booleans())
@pytest.mark.slow
def test_a_configuration_is_understood_or_refused(config: dict[str, Any], own: bool) -> None:
    try:
        settings_ = resolve({}, {"memlog": config} if own else config)
    except ConfigurationError:
        return
    # What was understood can be sent to the helper and to a tracker.
    assert msgspec.json.decode(msgspec.json.encode(settings_), type=Settings) == settings_
    assert all(isinstance(text, str) for text in settings_.described().values())


@given(st.text() | st.sampled_from(["..", ".", "/", "../runs", "*", "latest/..", "\0", "a/b"]))
def test_no_run_id_leads_out_of_the_folder(tmp_path_factory: Any, name: str) -> None:
    root = tmp_path_factory.getbasetemp() / "ids"
    if not root.exists():
        for _ in range(2):
            run = new_run(root)
            JournalWriter(
                run.path, run=run.id, role="trainer", begun_us=1, diagnostics=Diagnostics()
            ).close()
    try:
        assert find_run(root, name).path.parent == root
    except RunNotFoundError:
        return


@given(st.binary(max_size=300) | ANYTHING.map(lambda value: repr(value).encode()))
def test_a_message_to_the_helper_is_one_or_is_refused(line: bytes) -> None:
    try:
        decode(line)
    except msgspec.MsgspecError:
        return
    raise AssertionError(line)


@settings(max_examples=200)
@given(st.text(max_size=300) | st.sampled_from(["../out", "/etc/passwd", "CON", "a/b", ".", "nul"]))
def test_a_kept_file_stays_in_the_runs_folder(tmp_path_factory: Any, name: str) -> None:
    root = tmp_path_factory.getbasetemp() / "kept"
    run = RunDirectory(root / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    (root / "source").write_bytes(b"content")
    try:
        artifact = keep(run, root / "source", name, name)
    except ValueError:
        assert not re.search("[A-Za-z0-9]", name)
    else:
        assert (run.path / artifact.path).parent == run.artifacts
        assert (run.path / artifact.path).read_bytes() == b"content"
    assert {path.name for path in root.iterdir()} <= {"run", "source"}
    assert {path.name for path in run.path.iterdir()} <= {"artifacts"}
