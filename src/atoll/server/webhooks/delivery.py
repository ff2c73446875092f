"""Deliver events of sandboxes to other servers: signed posts to a URL that is leased.

A lease lasts for minutes and is kept in memory: a client that wants more renews it, and a client that has died is
forgotten. Events are read from the journal, from a cursor, so nothing waits in memory however slow the receiver is, and
nothing is left out when it comes back within its lease. A URL gets events only after it has answered a signed
challenge, which only the holder of the lease's secret can recognize. The server can therefore not be used to send
messages to strangers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import random
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from atoll.errors import SandboxError
from atoll.manager import Event, LimitReachedError
from atoll.server.webhooks.posting import NotPostedError, parse, post
from atoll.service import Caller, Identities, NotAuthenticatedError, SandboxService
from atoll.service.failures import WebhookNotFoundError
from atoll.signature import HEADER, sign
from atoll.waiting import EventSignal, happens_within

_MAX_OF_ONE = 8
_BATCH = 100
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Webhook:
    id: str
    caller: Caller
    url: str
    secret: bytes
    after: int
    until: float
    """When the lease ends, on the monotonic clock of this process."""
    failing: bool = False
    delivered: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


class Webhooks:
    def __init__(
        self, sandboxes: SandboxService, identities: Identities, happened: EventSignal, hosts: Collection[str]
    ) -> None:
        self._sandboxes = sandboxes
        self._identities = identities
        self._happened = happened
        self._hosts = frozenset(hosts)
        self._all: dict[str, Webhook] = {}

    def of(self, caller: Caller) -> list[Webhook]:
        return [hook for hook in self._all.values() if caller.owner in (None, hook.caller.user_id)]

    async def lease(self, caller: Caller, url: str, secret: bytes, lease_s: float, after: int | None) -> Webhook:
        """Begin or renew a lease.

        Raises ValueError if the URL does not answer as it should. The reason is not given, because it would reveal what
        exists on the server's network.
        """
        parse(url)
        mine = [hook for hook in self._all.values() if hook.caller.user_id == caller.user_id]
        hook = next((each for each in mine if each.url == url and hmac.compare_digest(each.secret, secret)), None)
        until = time.monotonic() + lease_s
        if hook is None:
            if len(mine) >= _MAX_OF_ONE:
                raise LimitReachedError(f"a user has at most {_MAX_OF_ONE} webhooks", hint="Delete one of them first.")
            hook = Webhook(secrets.token_hex(8), caller, url, secret, after or 0, until, failing=True)
            self._all[hook.id] = hook  # it counts against the maximum from now on
            try:
                if after is None:
                    hook.after = await self._sandboxes.manager.latest_event()
                await self._introduce(hook)
            except BaseException:
                self._all.pop(hook.id, None)
                raise
            if hook.id not in self._all:
                raise WebhookNotFoundError(f"the webhook {hook.id!r} was removed meanwhile")
            hook.failing = False
            hook.task = asyncio.create_task(self._tell(hook), name=f"webhook {hook.id}")
        hook.caller, hook.until = caller, until
        return hook

    async def remove(self, caller: Caller, webhook_id: str) -> None:
        hook = self._all.get(webhook_id)
        if hook is None or hook not in self.of(caller):
            raise WebhookNotFoundError(f"there is no webhook {webhook_id[:64]!r}")
        await self._end(hook)

    async def aclose(self) -> None:
        for hook in list(self._all.values()):
            await self._end(hook)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _introduce(self, hook: Webhook) -> None:
        word = secrets.token_hex(16)
        try:
            status, answer = await self._post(hook, {"type": "ping", "challenge": word})
            good = status == 200 and hmac.compare_digest(str(json.loads(answer)["challenge"]).encode(), word.encode())
        except (NotPostedError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.info("the webhook %s cannot be used: %s", _place(hook), error)
            good = False
        if not good:
            raise ValueError(
                "the URL did not answer with the challenge: it must be public and handle messages of type `ping`"
            )

    async def _tell(self, hook: Webhook) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while hook.left_s > 0 and await self._is_still_allowed(hook):
                upcoming = self._happened.next
                events, after = await self._sandboxes.events(hook.caller, after=hook.after, limit=_BATCH)
                if not events:
                    hook.after = after
                    await happens_within(upcoming, max(0.0, hook.left_s))
                elif await self._is_told(hook, events, after):
                    hook.failing, hook.after, pause_s = False, after, _FIRST_PAUSE_S
                    hook.delivered += len(events)
                else:
                    hook.failing = True
                    await asyncio.sleep(min(pause_s * (0.5 + random.random()), max(0.0, hook.left_s)))  # noqa: S311
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except SandboxError as error:
            _log.warning("the webhook %s ends: %s", _place(hook), error)
        finally:
            self._all.pop(hook.id, None)

    async def _is_told(self, hook: Webhook, events: list[Event], after: int) -> bool:
        told = [_words(event) for event in events]
        try:
            status, _ = await self._post(hook, {"type": "events", "events": told, "next_after": after})
        except NotPostedError as error:
            _log.debug("the webhook %s did not accept a message: %s", _place(hook), error)
            return False
        return 200 <= status < 300

    async def _post(self, hook: Webhook, message: dict[str, object]) -> tuple[int, bytes]:
        body = json.dumps(message, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", HEADER: sign(hook.secret, body)}
        return await post(hook.url, headers, body, hosts=self._hosts)

    async def _is_still_allowed(self, hook: Webhook) -> bool:
        """Whether the credential of the webhook is still valid. Its key may have been revoked, or its user locked
        out."""
        try:
            await self._identities.check(hook.caller)
        except NotAuthenticatedError:
            return False
        return True

    async def _end(self, hook: Webhook) -> None:
        self._all.pop(hook.id, None)
        if hook.task is not None:
            hook.task.cancel()
            await asyncio.gather(hook.task, return_exceptions=True)


def _place(hook: Webhook) -> str:
    """Return the part of the URL that is no secret: a path or a query may be the key to it."""
    parts = urlsplit(hook.url)
    return f"{hook.id} at {parts.scheme}://{parts.netloc}"


def _words(event: Event) -> dict[str, object]:
    return {
        "number": event.number,
        "at": event.at,
        "sandbox_id": event.sandbox_id,
        "before": event.before,
        "after": event.after,
        "cause": event.cause,
        "reason": event.reason,
        "kind": event.kind,
        "data": json.loads(event.data) if event.data else None,
    }
