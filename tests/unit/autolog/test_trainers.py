"""memlog's package for a trainer is imported with the trainer's library. A broken package harms nobody."""

import logging
import sys
from typing import Any

import pytest

from memlog.autolog import optimizer_steps, run_detector


def test_a_package_that_cant_be_imported_is_logged_and_the_script_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_detector, "_PACKAGE", "memlog_nowhere")
    monkeypatch.setattr(optimizer_steps, "TRAINER", "json")
    with caplog.at_level(logging.WARNING, "memlog"):
        optimizer_steps.Autolog(print).remove()
    assert (
        "so memlog counts optimizer steps, not the Trainer's steps: update memlog and transformers"
        in caplog.text
    )


def test_a_package_is_imported_as_soon_as_the_trainer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    loaded: list[Any] = []
    monkeypatch.setattr(optimizer_steps, "TRAINER", "colorsys")
    monkeypatch.setattr(optimizer_steps, "load_package", loaded.append)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    autolog = optimizer_steps.Autolog(print)
    assert loaded == []
    import colorsys

    assert loaded == [colorsys]
    autolog.remove()
    assert sys.meta_path == before
