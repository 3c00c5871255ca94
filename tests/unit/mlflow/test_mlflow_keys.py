"""Keys that MLflow accepts: it refuses a whole batch because of one bad key."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric, _validate_param

from memlog_mlflow.keys import MAX_KEY, safe_key

ANY_NAME = st.text(max_size=600) | st.text(alphabet="./a: \n", max_size=300)


@given(ANY_NAME)
@example("")
@example("..")
@example("...")
@example("a//b/./../c/")
@example("/" * 400)
@example("\n")
@example("a" * 251)
@example("\ud800")
def test_mlflow_accepts_any_safe_key(name: str) -> None:
    key = safe_key(name)
    _validate_metric(key, 1.0, 0, 0)  # type: ignore[no-untyped-call]
    _validate_param(key, "value")  # type: ignore[no-untyped-call]
    assert key.isascii()
    assert len(key) <= MAX_KEY


@given(ANY_NAME)
def test_a_safe_key_stays_as_it_is(name: str) -> None:
    assert safe_key(safe_key(name)) == safe_key(name)


@given(st.lists(ANY_NAME, unique=True, max_size=20))
def test_different_names_get_different_keys(names: list[str]) -> None:
    assert len({safe_key(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        "memory/host/rss_mib",
        "memory/layers/encoder.layers.0.peak_mib",
        "memory/scope/forward pass: warm-up/mib",
        "a" * MAX_KEY,
        ".hidden",
    ],
)
def test_a_fine_name_stays_as_it_is(name: str) -> None:
    assert safe_key(name) == name


def test_long_names_that_begin_alike_stay_apart_and_readable() -> None:
    one, other = (safe_key("memory/layers/" + "block." * 60 + end) for end in ("weight", "bias"))
    assert one != other
    assert one.startswith("memory/layers/block.block.")
    assert len(one) == MAX_KEY
