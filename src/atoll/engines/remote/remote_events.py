"""Learning about changes of sandboxes on a server: by webhooks where the server can reach this program, otherwise by
polling.

A webhook is only a hint; the state of a sandbox is always read from the server. Without reliable webhooks the server is
polled every `polling_interval` seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

from atoll.engines.remote.rest_client import Server
from atoll.errors import SandboxError
from atoll.signature import SignatureError, Verifier

_LEASE_S = 120.0
_RENEW_S = 30.0
_PAGE = 1000
_log = logging.getLogger(__name__)


class RemoteEvents:
    """One task for all sandboxes of a server. `on_change` receives the server's sandbox ids."""

    def __init__(self, server: Server, on_change: Callable[[str], None], interval_s: float, url: str | None) -> None:
        self._server = server
        self._on_change = on_change
        self._interval_s = interval_s
        self._url = url
        self._secret = secrets.token_bytes(32)
        self._verifier = Verifier(self._secret)
        self._after: int | None = None
        self._told = False
        """Whether the server reports that its webhooks arrive."""
        self.received = 0

    async def run(self) -> None:
        """Poll and renew the webhook for ever."""
        while True:
            try:
                await self._poll()
                self._told = self._url is not None and await self._lease(self._url)
            except SandboxError as error:
                self._told = False
                _log.debug("the server cannot say what happened: %s", error)
            await asyncio.sleep(self._pause_s())

    def receive(self, signature: str, body: bytes) -> str | None:
        """Handle a message of the server. Returns the challenge that proves that this program asked for the messages,
        if the server sent one."""
        if self._url is None:
            raise SignatureError("no messages were requested")
        self._verifier.check(signature, body)
        try:
            message = json.loads(body)
            self._happened(message.get("events", []))
            word = message.get("challenge")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SignatureError("invalid message") from error
        self.received += 1
        return str(word) if word is not None else None

    def _pause_s(self) -> float:
        """Return the time until the next poll. While webhooks arrive, polling only detects that they have stopped."""
        if self._url is None:
            return self._interval_s
        return min(_RENEW_S, 2 * self._interval_s if self._told else self._interval_s)

    async def _poll(self) -> None:
        if self._after is None:
            self._after = int((await self._server.call("GET", "/events", params={"limit": "1"}))["latest"])
            return
        while True:
            query = {"after": str(self._after), "limit": str(_PAGE)}
            page = await self._server.call("GET", "/events", params=query)
            self._happened(page["items"])
            before, self._after = self._after, int(page["next_after"])
            if self._after == before:  # a page may be shorter than the limit
                return

    async def _lease(self, url: str) -> bool:
        body = {"url": url, "secret": self._secret.hex(), "lease_s": _LEASE_S, "after": self._after}
        return not (await self._server.call("PUT", "/webhooks", json=body))["failing"]

    def _happened(self, events: list[dict[str, Any]]) -> None:
        # Only changes of state matter here. Sandboxes write reports, as many as they like.
        for id in {str(event["sandbox_id"]) for event in events if event.get("kind", "state") == "state"}:
            self._on_change(id)
