"""No error inside the monitors goes unnoticed."""

from collections.abc import Iterator

import pytest

from memlog.monitors import _publishing


@pytest.fixture
def nothing_goes_wrong_inside() -> Iterator[None]:
    before = dict(_publishing.HEALTH.faults)
    yield
    assert dict(_publishing.HEALTH.faults) == before
