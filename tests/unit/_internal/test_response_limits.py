"""Answers of servers are limited in size and time in memlog's own processes."""

from __future__ import annotations

import http.client
import resource
import time
import urllib.request

import pytest
import requests
from requests.adapters import HTTPAdapter
from support.misbehaving import ANSWERS, misbehaving_server

from memlog._internal.connections import MAX_ANSWER, bound_answers, waiting_at_most

TIMEOUT = 1.0
"""Seconds that a client waits for a byte."""
PATIENCE = 20.0
"""Maximum seconds for a whole answer, also on a busy machine. Without limits, slow answers take 30 min."""


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.client.HTTPConnection, "response_class", http.client.HTTPResponse)
    monkeypatch.setattr(HTTPAdapter, "send", HTTPAdapter.send)
    bound_answers()


@pytest.mark.parametrize("answer", ANSWERS)
def test_it_ends_and_takes_a_bounded_part(answer: str) -> None:
    begun, before = time.monotonic(), _highest()
    with misbehaving_server(answer) as server, pytest.raises((OSError, requests.RequestException)):
        requests.get(server.url, timeout=TIMEOUT)
    assert time.monotonic() - begun < PATIENCE
    assert server.sent < 2 * MAX_ANSWER
    assert _highest() - before < 6 * MAX_ANSWER


@pytest.mark.parametrize("answer", ["headers byte by byte", "a body byte by byte"])
def test_the_limit_holds_for_pythons_own_client(answer: str) -> None:
    begun = time.monotonic()
    with misbehaving_server(answer) as server, pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(server.url, timeout=TIMEOUT).read()  # noqa: S310
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.parametrize("answer", ["a body byte by byte", "silence"])
def test_a_command_may_wait_for_less_than_its_client(answer: str) -> None:
    begun = time.monotonic()
    with (
        misbehaving_server(answer) as server,
        waiting_at_most(0.5),
        pytest.raises((OSError, requests.RequestException)),
    ):
        requests.get(server.url, timeout=600)
    assert time.monotonic() - begun < PATIENCE


def test_what_is_downloaded_may_be_larger_than_an_answer() -> None:
    taken = 0
    with (
        misbehaving_server("a body without end") as server,
        requests.get(server.url, timeout=TIMEOUT, stream=True) as response,
    ):
        for block in response.iter_content(65_536):
            taken += len(block)
            if taken > 2 * MAX_ANSWER:
                break
    assert taken > 2 * MAX_ANSWER


def _highest() -> int:
    """Highest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
