"""Alerts to a webhook, as JSON signed with HMAC, or in Slack's form.

The address and the key are credentials. They reach the helper process through its pipe or its environment,
and are written to no file.
"""

from __future__ import annotations

from memlog.settings import WEBHOOK, WEBHOOK_KEY, webhook_address
from memlog.sink import ClientBackend, ClientVariables, Connection


class WebhookBackend(ClientBackend):
    """Backend that sends alerts to the address of ``init(alert_webhook=…)`` or of the environment."""

    name = extra = "webhook"
    requires = "memlog"
    joins = False
    sink = "memlog_webhook.sink:WebhookSink"
    variables = ClientVariables(names=frozenset({WEBHOOK_KEY}))

    def connection(self) -> Connection:
        """Return the address and the key, as variables."""
        address = webhook_address()
        named = {WEBHOOK: address} if address else {}
        return Connection(environment={**self.variables.gathered(), **named})


backend = WebhookBackend()
"""Backend that memlog loads through the entry point ``memlog.sinks``."""

__all__ = ["backend"]
