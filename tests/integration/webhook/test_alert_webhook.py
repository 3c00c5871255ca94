"""Alerts arrive at a webhook: signed, once, also after an outage; the address stands nowhere."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support import child
from support.mlflow_server import free_port
from support.servers import body_of

from memlog.errors import ConfigurationError, TrackerRejectedError, TrackerUnavailableError
from memlog.events import Alert
from memlog.settings import WEBHOOK, WEBHOOK_KEY, Settings, resolve, webhook_address
from memlog.sink import Connection, Target
from memlog_webhook import backend
from memlog_webhook.sink import slack_form

pytestmark = pytest.mark.integration

SECRET = "s3cretPathOfTheHook"  # noqa: S105 - a test's
KEY = "the key of the receiver"
PROGRAM = """
    import os

    import memlog

    session = memlog.init("local", dir="runs", alerts=["host.rss > 1 MiB"], finish_timeout={timeout},
                          config={{"linger": {linger}}}, alert_webhook={argument})
    for step in range(20):
        session.step()
    memlog.finish()
"""


class Receiver:
    """Webhook on loopback that answers with `answer`. It can be stopped and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.answer = 204
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{SECRET}?token=t0ken"

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.requests.append((self.path, dict(self.headers), body_of(self)))
                self.send_response(receiver.answer)
                if receiver.answer == 302:
                    self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.start()
    yield receiver
    receiver.stop()


def program(argument: str = "None", timeout: int = 60, linger: int = 60) -> str:
    return PROGRAM.format(argument=argument, timeout=timeout, linger=linger)


def memlog_command(*arguments: str, directory: Path, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "memlog", *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def require_secrecy(folder: Path, *texts: str) -> None:
    """Check that the address and the key are in no file and in no text."""
    script = folder / "train.py"
    found = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != script]
    for content in (*found, *(text.encode() for text in texts)):
        for secret in (SECRET, "t0ken", KEY):
            assert secret.encode() not in content


def alert(step: int) -> Alert:
    return Alert(
        step * 1_000_000, step, "warning", "host.rss > 1 MiB", f"at {step}", "<text> & more"
    )


def test_an_alert_arrives_once_and_signed(receiver: Receiver, tmp_path: Path) -> None:
    printed = child.run(program(repr(receiver.address)), tmp_path, **{WEBHOOK_KEY: KEY})
    ((path, headers, body),) = receiver.requests
    assert path == f"/{SECRET}?token=t0ken"
    wanted = hmac.new(KEY.encode(), body, hashlib.sha256).hexdigest()
    assert headers["X-Hub-Signature-256"] == f"sha256={wanted}"
    form = json.loads(body)
    assert headers["X-Memlog-Delivery"] == form["id"]
    assert (form["level"], form["rule"]) == ("warning", "host.rss > 1 MiB")
    assert "over 1 MiB" in form["title"]
    assert form["value"] > 2**20
    shown = memlog_command("show", "latest", "--all", "--dir", "runs", directory=tmp_path)
    assert "webhook  alerts" in shown.stdout
    as_json = memlog_command("show", "latest", "--json", "--dir", "runs", directory=tmp_path)
    assert form["run"] == json.loads(as_json.stdout)["run"]["id"]
    report = memlog_command("report", "latest", "-o", "r.html", "--dir", "runs", directory=tmp_path)
    assert report.returncode == 0
    require_secrecy(tmp_path, printed, shown.stdout, as_json.stdout)


def test_memlog_run_and_the_environment_name_the_webhook(
    receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import memlog\nsession = memlog.init()\n[session.step() for _ in range(20)]\nmemlog.finish()\n"
    )
    command = ("--alert", "host.rss > 1 MiB", "--dir", "runs", "--", sys.executable, "train.py")
    by_option = ("run", "--alert-webhook", receiver.address, *command)
    done = memlog_command(*by_option, directory=tmp_path)
    assert (done.returncode, len(receiver.requests)) == (0, 1), done.stderr
    environment = {WEBHOOK: receiver.address}
    done = memlog_command("run", *command, directory=tmp_path, **environment)
    assert (done.returncode, len(receiver.requests)) == (0, 2), done.stderr
    require_secrecy(tmp_path, done.stdout, done.stderr)


def test_after_an_outage_sync_delivers_from_the_journal(receiver: Receiver, tmp_path: Path) -> None:
    receiver.stop()
    printed = child.run(program(timeout=5, linger=1), tmp_path, **{WEBHOOK: receiver.address})
    assert receiver.requests == []
    shown = memlog_command("show", "latest", "--dir", "runs", directory=tmp_path)
    assert "the alert webhook does not answer (connection refused)" in shown.stdout
    unset = ("sync", "latest", "--timeout", "0", "--dir", "runs")
    refused = memlog_command(*unset, directory=tmp_path)
    assert refused.returncode != 0
    assert f"set {WEBHOOK} to its address" in refused.stderr
    receiver.start()
    for _ in range(2):
        environment = {WEBHOOK: receiver.address}
        done = memlog_command("sync", "latest", "--dir", "runs", directory=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
    assert len(receiver.requests) == 1
    require_secrecy(tmp_path, printed, shown.stdout, refused.stderr, done.stdout)


def test_the_helper_process_tries_again(receiver: Receiver, tmp_path: Path) -> None:
    receiver.stop()
    child.run(program(timeout=0), tmp_path, **{WEBHOOK: receiver.address})
    receiver.start()
    deadline = time.monotonic() + 60
    while not receiver.requests:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (state,) = tmp_path.glob("runs/*/*/webhook.json")
    while json.loads(state.read_text())["stage"] != "done":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(receiver.requests) == 1


def sink_for(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(WEBHOOK, receiver.address)
    monkeypatch.setenv(WEBHOOK_KEY, KEY)
    return backend.open_sink(Target("run", None, connection=Connection()))


def test_of_several_alerts_those_that_arrived_are_not_sent_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_for(receiver, monkeypatch)
    sink.log_alerts([alert(0), alert(1)], 0)
    receiver.answer = 503
    alerts = [alert(0), alert(1), alert(2)]
    with pytest.raises(TrackerUnavailableError, match="answers 503"):
        sink.log_alerts(alerts, 1)
    receiver.answer = 200
    sink.log_alerts(alerts, 1)
    titles = [json.loads(body)["title"] for *_, body in receiver.requests]
    assert titles == ["at 0", "at 1", "at 2", "at 2"]
    identities = [headers["X-Memlog-Delivery"] for _, headers, _ in receiver.requests]
    assert len(set(identities)) == 3


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (400, TrackerRejectedError, r"refuses an alert \(400\)"),
        (403, TrackerUnavailableError, f"answers 403: set {WEBHOOK}"),
        (404, TrackerUnavailableError, f"answers 404: set {WEBHOOK}"),
        (429, TrackerUnavailableError, "answers 429$"),
        (302, TrackerUnavailableError, "answers 302$"),
    ],
)
def test_an_answer_other_than_success_is_told(
    answer: int,
    error: type[Exception],
    text: str,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.answer = answer
    sink = sink_for(receiver, monkeypatch)
    with pytest.raises(error, match=text) as raised:
        sink.log_alerts([alert(0)], 0)
    assert SECRET not in str(raised.value)
    assert [path for path, *_ in receiver.requests] == [f"/{SECRET}?token=t0ken"]


def test_slack_gets_its_own_form() -> None:
    form = slack_form(alert(3), "abc", "with <memory>")
    assert form == {
        "text": ":warning: *at 3*\n&lt;text&gt; &amp; more\n_memlog: with &lt;memory&gt;, step 3_"
    }


@pytest.mark.parametrize(
    "wrong",
    [
        "hooks.slack.com/x",
        "ftp://host/x",
        "https:///x",
        "https://u:p@host/x",
        "http://h/a b",
        True,
        3,
    ],
)
def test_a_wrong_address_raises_at_once_and_is_not_shown(
    wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WEBHOOK, raising=False)
    with pytest.raises(ConfigurationError, match="pass that of a webhook") as raised:
        resolve({"alert_webhook": wrong})
    assert str(wrong) not in str(raised.value)


def test_the_address_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK, "https://example.com/env")
    settings = resolve({"alert_webhook": "https://example.com/argument"})
    assert settings.alert_webhook is True
    assert webhook_address() == "https://example.com/argument"
    assert "example.com" not in repr(settings)
    assert set(settings.described()) == {"every"}
    assert resolve({}).alert_webhook
    assert webhook_address() == "https://example.com/env"
    monkeypatch.delenv(WEBHOOK)
    assert resolve({}) == Settings(directory=resolve({}).directory)
    assert webhook_address() is None
