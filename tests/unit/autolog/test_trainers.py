"""Integrations of trainers are imported with the trainer's library. A broken integration harms nobody."""

import logging
import sys

import pytest

from memlog.autolog import trainers


def test_a_package_that_cant_be_imported_is_logged_and_the_script_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainers, "_PACKAGES", {"json": "memlog_nowhere"})
    with caplog.at_level(logging.WARNING, "memlog"):
        trainers.TrainerWatch().remove()
    assert (
        "memlog_nowhere can't be imported, and memlog counts optimizer steps instead" in caplog.text
    )


def test_a_package_is_imported_as_soon_as_the_trainer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(trainers, "_PACKAGES", {"colorsys": "package"})
    loaded: list[str] = []
    monkeypatch.setattr(trainers, "_load", lambda package, _module=None: loaded.append(package))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    watch = trainers.TrainerWatch()
    assert loaded == []
    import colorsys  # noqa: F401

    assert loaded == ["package"]
    watch.remove()
    assert sys.meta_path == before
