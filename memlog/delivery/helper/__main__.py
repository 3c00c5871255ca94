"""``python -m memlog.delivery.helper``: the helper process, started by memlog.init()."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

# `python -m` puts the working directory first on the path. Python would then import the user's own
# folders named `mlflow` or `wandb`. If the working directory was deleted, it is not on the path.
with suppress(FileNotFoundError):
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with what the interpreter wrote
        del sys.path[0]

from memlog._internal.diagnostics import Diagnostics
from memlog.bus import EventBus
from memlog.delivery.helper.judging import HelperJudge, Rules
from memlog.delivery.helper.process import main
from memlog.delivery.helper.protocol import Begin, alert_sender
from memlog.events import Alert, Event


def judge(begin: Begin, bus: EventBus, diagnostics: Diagnostics) -> HelperJudge:
    """Return the judge of the run's growth and alert rules."""
    return HelperJudge(begin, bus, diagnostics, _rules, _sender_of_alerts(begin))


def _rules(
    begin: Begin,
    publish: Callable[[Event], object],
    ask_for_garbage: Callable[[], object],
    diagnostics: Diagnostics,
) -> Rules | None:
    if not begin.settings.alerts:
        return None
    # Imported here, because most runs have no rules.
    from memlog.alerts import parse_rules  # noqa: PLC0415
    from memlog.alerts.engine import engine_for  # noqa: PLC0415

    rules = parse_rules(begin.settings.alerts)
    return engine_for(rules, publish, diagnostics, begin.trainer_pid, ask_for_garbage)


def _sender_of_alerts(begin: Begin) -> Callable[[Alert], bool]:
    """Return a function that sends alerts of sampled figures at once, through the pipe for such alerts."""
    if begin.alerts_fd is None or not begin.settings.alerts:
        return lambda _: False
    from memlog.alerts import parse_rules  # noqa: PLC0415 - see above

    sampled = {rule.text for rule in parse_rules(begin.settings.alerts) if rule.sampled}
    send = alert_sender(begin.alerts_fd)

    def send_at_once(alert: Alert) -> bool:
        if alert.rule not in sampled:
            return False
        send(alert)
        return True

    return send_at_once


if __name__ == "__main__":
    main(judge)
