"""``python -m memlog.delivery``: the helper process, started by memlog.init()."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

# `python -m` puts the working directory first on the path, where a folder of the user's named `mlflow`
# or `wandb` would be taken for the package. Where that folder is gone, the interpreter finds none to put.
with suppress(FileNotFoundError):
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with what the interpreter wrote
        del sys.path[0]

from memlog.alerts import engine_for, parse_rules
from memlog.bus import EventBus
from memlog.delivery.backchannel import teller
from memlog.delivery.helper import main
from memlog.delivery.messages import Begin
from memlog.health import Health


def judge(begin: Begin, bus: EventBus, health: Health) -> Callable[[], dict[str, str]]:
    """Puts the alert rules about the samples on the helper's bus.

    Returns:
        What tells of rules that were never judged, and why.
    """
    rules = parse_rules(begin.settings.alerts)
    engine = engine_for(rules, bus.publish, health, pid=begin.trainer_pid, sampled=True)
    if engine is not None:
        bus.subscribe(engine)
        if begin.alerts_fd is not None:
            bus.subscribe(teller(begin.alerts_fd))
    return dict if engine is None else engine.never_judged


if __name__ == "__main__":
    main(judge)
