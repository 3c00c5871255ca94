"""Arguments that a session refuses, each with its remedy."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import memlog

pytestmark = pytest.mark.usefixtures("runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mlfow"}, "did you mean 'mlflow'"),
        ({"backend": "nothing"}, "available: local, mlflow"),
        ({"backend": 3}, "pass a name such as 'mlflow'"),
        ({"backend": ["local", 3]}, "pass a name such as 'mlflow'"),
        ({"every": 0}, "every=0: pass a whole number from 1 up"),
        ({"dir": "/proc/nowhere"}, "set MEMLOG_DIR to a folder that can be written"),
        ({"config": 7}, "pass a plain mapping"),
        ({"dir": "runs\udcff"}, "a path that is valid UTF-8"),
        ({"dir": 3}, "dir=3: pass the path of a folder"),
        ({"name": "\udcff"}, "pass text of at most 1,000 valid Unicode characters"),
    ],
)
def test_an_invalid_argument_is_one_line_with_the_remedy(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(memlog.MemlogError) as raised:
        memlog.init(**arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_status_is_an_error() -> None:
    with pytest.raises(memlog.ConfigurationError, match="'finished', 'failed' or 'killed'"):
        memlog.init("local").finish("done")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt", "model=str"),
        ([torch.nn.Linear(1, 1)], "model=list"),
        (torch.nn.Linear, "the class Linear"),
    ],
)
def test_an_invalid_model_raises_at_init(model: object, message: str) -> None:
    with pytest.raises(memlog.ConfigurationError, match=f"{message}: pass the torch.nn.Module"):
        memlog.init("local", model=model)
    assert not list(Path(os.environ["MEMLOG_DIR"]).iterdir())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_wrong_rule_raises_at_init_and_ends_nothing(enabled: bool) -> None:
    running = memlog.init("local")
    with pytest.raises(memlog.ConfigurationError) as raised:
        memlog.init("local", alerts="host.rss > 32 apples", enabled=enabled)
    assert str(raised.value) == (
        "an alert rule can't be read: write the unit here: B, KiB, MiB, GiB or TiB, or %\n"
        "  host.rss > 32 apples\n"
        "                ^"
    )
    assert running.enabled
