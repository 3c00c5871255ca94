"""Memory that saving a checkpoint from a CUDA device takes, on the host and on the device."""

import pytest

from tests.integration.estimates.test_saving import check, saves
from tests.support.saves import OF_A_PROCESS, OF_SHARDED

pytestmark = [pytest.mark.cuda, pytest.mark.slow]


def test_saves_from_a_device_take_what_is_computed() -> None:
    found = saves("cuda", *OF_A_PROCESS)
    assert [each["way"] for each in found] == list(OF_A_PROCESS)
    for each in found:
        check(each)


def test_saves_of_a_sharded_model_take_what_is_computed() -> None:
    """Gathering takes the whole of the largest tensor on the device, and page-locked copies on the host."""
    found = saves("cuda", *(f"sharded:{way}" for way in OF_SHARDED))
    assert len(found) == len(OF_SHARDED)
    for each in found:
        check(each)
