"""memlog in Keras on torch, which steps no PyTorch optimizer."""

from __future__ import annotations

from collections import Counter

import pytest
from support import child

from memlog.events import Batch, Event, Phase, Run
from memlog.journal import list_runs

pytestmark = pytest.mark.integration

SCRIPT = """
    import json
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    import memlog
    from memlog_keras import MemlogCallback

    inputs, targets = np.ones((50, 4)), np.ones((50, 1))

    class Raising(keras.callbacks.Callback):
        def on_test_batch_end(self, *_, **__):
            raise RuntimeError("the evaluation fails")

    def fit(name, callback, epochs=2):
        memlog.init("local", name=name)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
        for _ in range(1 if epochs else 2):
            model.fit(
                inputs,
                targets,
                batch_size=10,
                epochs=epochs or 1,
                validation_data=(inputs, targets),
                verbose=0,
                callbacks=[callback],
            )
        memlog.finish()

    MemlogCallback().on_train_begin()  # without a session
    callback = MemlogCallback()
    fit("epochs", callback)
    fit("two fits", callback, epochs=0)

    memlog.init("local", name="an error")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    try:
        model.evaluate(inputs, targets, verbose=0, callbacks=[MemlogCallback(), Raising()])
    except RuntimeError:
        model.fit(inputs, targets, batch_size=10, verbose=0, callbacks=[MemlogCallback()])
    memlog.finish()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[Event]]:
    """The events of each run, by the run's name."""
    folder = tmp_path_factory.mktemp("keras")
    child.run(SCRIPT, folder)
    recorded = [list(run.events()) for run in list_runs(folder / "memlog_runs")]
    return {event.name: events for events in recorded for event in events if isinstance(event, Run)}


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Batch)]


@pytest.mark.parametrize("name", ["epochs", "two fits"])
def test_each_batch_of_all_epochs_is_a_step(runs: dict[str | None, list[Event]], name: str) -> None:
    assert steps_of(runs[name]) == list(range(10))


def test_each_validation_is_a_phase(runs: dict[str | None, list[Event]]) -> None:
    phases = Counter(event.label for event in runs["epochs"] if isinstance(event, Phase))
    assert phases == {"validation": 2}


def test_an_evaluation_that_raised_is_over_when_the_next_fit_begins(
    runs: dict[str | None, list[Event]],
) -> None:
    marked = [type(event) for event in runs["an error"] if isinstance(event, (Batch, Phase))]
    assert marked == [Phase, *[Batch] * 5]
