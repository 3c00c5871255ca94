"""Sink that posts a run's alerts to a webhook. The sink runs in a process of memlog's own."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from memlog import __version__
from memlog._internal.connections import reason_of
from memlog.errors import TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert, Artifact, Status
from memlog.settings import WEBHOOK, WEBHOOK_KEY
from memlog.sink import Point, Resolution, Target, TrackerRun, valid_text

SLACK = "hooks.slack.com"
"""Host of Slack's incoming webhooks, which take a form of their own and check no signature."""
_TIMEOUT = 10.0
_REFUSES_CONTENT = frozenset({400, 413, 415, 422})
_SIGNS = {"info": ":information_source:", "warning": ":warning:", "error": ":rotating_light:"}


class WebhookSink:
    """A `memlog.sink.Sink` for a webhook. It sends alerts, and ignores all other data.

    Each alert is one request. An alert is sent again only if its answer was lost: its id is the same then.

    Args:
        target: The run, whose id each request names.

    Attributes:
        dropped: Always empty. Alerts that the webhook refuses are counted by the caller.
    """

    durable = True
    resolution: Resolution = "bucketed"
    max_points = 1000
    has_files = False
    takes_points = False

    def __init__(self, target: Target) -> None:
        self.dropped: Mapping[str, int] = {}
        self._run = target.own_id
        self._name = target.name
        self._sent: set[str] = set()

    def probe(self) -> None:
        """Check that the address is known. The webhook itself can only be tried with an alert."""
        if not os.environ.get(WEBHOOK):
            raise TrackerUnavailableError(
                f"alerts wait for their webhook: set {WEBHOOK} to its address"
            )

    def open(self) -> TrackerRun:
        """Return the run. A webhook has no runs, so nothing is opened."""
        self.probe()
        return TrackerRun(self._run, name=self._name)

    def log_points(self, points: Sequence[Point]) -> None:
        """Do nothing."""

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Do nothing."""

    def log_artifact(self, artifact: Artifact, file: Path) -> None:
        """Do nothing."""

    def close(self, status: Status | None, ended_us: int | None = None) -> None:
        """Do nothing."""

    def log_alerts(self, alerts: Sequence[Alert], first_new: int) -> None:
        """Post each new alert."""
        self.probe()
        refused: TrackerRejectedError | None = None
        for alert in alerts[first_new:]:
            identity = self._id(alert)
            if identity in self._sent:  # its successor failed, so both are sent again
                continue
            try:
                self._post(alert, identity)
            except TrackerRejectedError as error:
                refused = error
            self._sent.add(identity)
        if refused is not None:
            raise refused

    def _post(self, alert: Alert, identity: str) -> None:
        address, key = os.environ[WEBHOOK], os.environ.get(WEBHOOK_KEY)
        is_slack = urlsplit(address).hostname == SLACK
        form = slack_form(alert, self._run, self._name) if is_slack else self._form(alert, identity)
        body = json.dumps(form).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"memlog/{__version__}",
            "X-Memlog-Event": "alert",
            "X-Memlog-Delivery": identity,
        }
        if key:
            headers["X-Hub-Signature-256"] = signature(key, body)
        request = urllib.request.Request(address, body, headers, method="POST")  # noqa: S310 - memlog.settings checks the scheme
        try:
            _OPENER.open(request, timeout=_TIMEOUT).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise _answered(error.code) from None
        except Exception as error:  # noqa: BLE001 - not chained: texts of the client may contain the address
            reason = reason_of(str(error)) or type(error).__name__
            raise TrackerUnavailableError(f"the alert webhook does not answer ({reason})") from None

    def _form(self, alert: Alert, identity: str) -> dict[str, Any]:
        return {
            "id": identity,
            "run": self._run,
            "run_name": self._name,
            "level": alert.level,
            "rule": valid_text(alert.rule),
            "title": valid_text(alert.title),
            "text": valid_text(alert.text),
            "step": alert.step,
            "evaluation": alert.evaluation,
            "epoch": alert.epoch,
            "value": alert.value,
            "time_us": alert.time_us,
        }

    def _id(self, alert: Alert) -> str:
        made = (self._run, alert.time_us, alert.rule, alert.title, alert.where)
        text = repr(made).encode("utf-8", "backslashreplace")
        return hashlib.blake2s(text, digest_size=16).hexdigest()


def signature(key: str, body: bytes) -> str:
    """Return the value of ``X-Hub-Signature-256``: HMAC with SHA-256, as GitHub's webhooks have it."""
    return f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"


def slack_form(alert: Alert, run: str, name: str | None) -> dict[str, str]:
    """Return an alert as a message of Slack's incoming webhooks, in Slack's mark-up."""
    where = f", {alert.where}" if alert.where else ""
    lines = [
        f"{_SIGNS[alert.level]} *{_escaped(alert.title)}*",
        *([_escaped(alert.text)] if alert.text else []),
        f"_memlog: {_escaped(name or run)}{where}_",
    ]
    return {"text": "\n".join(lines)}


def _escaped(text: str) -> str:
    # Slack's three control characters.
    valid = valid_text(text)
    return valid.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _answered(status: int) -> Exception:
    if status in _REFUSES_CONTENT:
        return TrackerRejectedError(f"the alert webhook refuses an alert ({status})")
    remedy = (
        f": set {WEBHOOK} and {WEBHOOK_KEY} as it wants" if status in (401, 403, 404, 410) else ""
    )
    return TrackerUnavailableError(f"the alert webhook answers {status}{remedy}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: another address must not get the alert."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
