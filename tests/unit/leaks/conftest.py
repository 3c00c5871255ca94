"""The search for owners sees no frozen objects, and all tests begin with what was collected frozen."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
