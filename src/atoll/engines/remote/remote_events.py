"""Learning what happens to sandboxes on a server without being asked: told by it where it can reach us, else by asking.

Being told is only ever a hint. Whatever is told or asked, the state of a sandbox is what the server says when it is
looked at, and while nothing is told for certain we ask every `polling_interval` seconds.
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
    """One task for all sandboxes of a server. `on_change` gets the server's ids."""

    def __init__(self, server: Server, on_change: Callable[[str], None], interval_s: float, url: str | None) -> None:
        self._server = server
        self._on_change = on_change
        self._interval_s = interval_s
        self._url = url
        self._secret = secrets.token_bytes(32)
        self._verifier = Verifier(self._secret)
        self._after: int | None = None
        self._told = False
        """Whether the server says that its messages reach us."""
        self.received = 0

    async def run(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._poll()
                self._told = self._url is not None and await self._lease(self._url)
            except SandboxError as error:
                self._told = False
                _log.debug("the server cannot say what happened: %s", error)
            await asyncio.sleep(self._pause_s())

    def receive(self, signature: str, body: bytes) -> str | None:
        """A message of the server. The word that proves that we are who asked for it, if it wants one."""
        if self._url is None:
            raise SignatureError("nobody asked for messages")
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
        """While we are told, asking is there only to notice that we are not any more."""
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
            if self._after == before:  # a page may be shorter than asked for
                return

    async def _lease(self, url: str) -> bool:
        body = {"url": url, "secret": self._secret.hex(), "lease_s": _LEASE_S, "after": self._after}
        return not (await self._server.call("PUT", "/webhooks", json=body))["failing"]

    def _happened(self, events: list[dict[str, Any]]) -> None:
        # Only changes matter here: reports are made by sandboxes, as often as they like.
        for id in {str(event["sandbox_id"]) for event in events if event.get("kind", "state") == "state"}:
            self._on_change(id)
