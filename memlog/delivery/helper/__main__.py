"""``python -m memlog.delivery.helper``: the helper process, started by memlog.init()."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# `python -m` puts the working directory first on the path. Python would then import the user's own
# folders named `mlflow` or `wandb`. If the working directory was deleted, it is not on the path.
with suppress(FileNotFoundError):
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with what the interpreter wrote
        del sys.path[0]

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.delivery.helper.alert_pipe import alert_sender
from memlog.delivery.helper.process import Judging, main
from memlog.delivery.helper.protocol import Begin
from memlog.events import Alert
from memlog.journal import RunDirectory
from memlog.leaks.detector import GrowthDetector
from memlog.leaks.finding_alerts import FindingAlerts
from memlog.leaks.findings import GrowthFindings

if TYPE_CHECKING:
    from memlog.alerts import AlertEngine


def judge(begin: Begin, bus: EventBus, diagnostics: Diagnostics) -> Judging:
    """Subscribe the growth detector and the alert rules about the samples to the helper's bus.

    Return two functions. The first function judges growth for the last time, and returns the rules that were
    never judged. The second function passes readings of child processes to the growth detector.
    """
    bus.subscribe(FindingAlerts(bus.publish))
    detector = GrowthDetector(begin.trainer_pid, GrowthFindings(bus.publish))
    bus.subscribe(detector)
    not_judged = _subscribe_rules(begin, bus, diagnostics)

    def end() -> dict[str, str]:
        with diagnostics.contained("judging growth a last time"):
            detector.finish()
        return not_judged()

    return Judging(end, detector.take_children)


def _subscribe_rules(
    begin: Begin, bus: EventBus, diagnostics: Diagnostics
) -> Callable[[], dict[str, str]]:
    if not begin.settings.alerts:
        return dict
    from memlog.alerts import engine_for, parse_rules  # noqa: PLC0415 - for runs that have rules

    rules = parse_rules(begin.settings.alerts)
    engine = engine_for(rules, bus.publish, diagnostics, pid=begin.trainer_pid, sampled=True)
    if engine is None:
        return dict
    if begin.again:
        earlier = RunDirectory(Path(begin.run_directory)).events("helper")
        engine.recall([event for event in earlier if isinstance(event, Alert)])
    bus.subscribe(engine)
    if begin.alerts_fd is not None:
        bus.subscribe(alert_sender(begin.alerts_fd))
    return partial(_not_judged, engine, begin)


def _not_judged(engine: AlertEngine, begin: Begin) -> dict[str, str]:
    """Return the rules that were never judged, each with the reason.

    If this helper process has replaced an earlier one, each reason says that the helper process was started
    again.
    """
    since = "not since the helper process was started again: " if begin.again else ""
    return {rule: since + why for rule, why in engine.never_judged().items()}


if __name__ == "__main__":
    main(judge)
