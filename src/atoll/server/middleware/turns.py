"""Share the time of the event loop between accounts: no account's requests fill it while another account needs it.

Every step of every task runs in one thread. A loop runs steps in the order in which they become ready, so an account
with many or expensive requests would delay each of the many steps of everybody else. Here a task whose context names an
account (`atoll.workers.account`) asks before each step. While other accounts are active too, an account that has used
up its part of the loop's time, and more of it than others, has to wait; its steps then run one after another. An
account alone never waits, and neither does a step that delivers a cancellation or an error.

What counts is elapsed time and not processor time: on a busy machine a step delays others just as long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.workers import account

ACTIVE_S = 0.03
"""How long an account still counts as active after its last step."""
PART = 0.3
"""The part of the loop's time for one account while another is active. The rest keeps the loop responsive for
others."""
CREDIT_S = 0.01
"""How much time an account may use at once before it has to wait."""
MAX_DEBT_S = 0.04
"""Maximum debt of an account, which bounds how long it waits after one long step."""


HEAVY = 0.67
"""An account has to wait only if it recently used this fraction of what the heaviest account used."""
_FORGET_S = 1.0
BYTE_S = 4e-3 / (1 << 20)
"""How much time a byte of a body costs. The loop's transports receive and send it outside of all tasks, and the kernel
copies it in the same thread."""


class Usage:
    """What one account uses while others are active."""

    def __init__(self, now: float) -> None:
        self.balance, self.at = CREDIT_S, now
        self._recent = 0.0
        self._counted_at = now
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.timer: asyncio.TimerHandle | None = None

    def refresh(self, now: float) -> float:
        self.balance = min(CREDIT_S, self.balance + PART * (now - self.at))
        self.at = now
        return self.balance

    def recent(self, now: float) -> float:
        """Return roughly how much of the last second the account used."""
        return self._recent * math.exp((self._counted_at - now) / _FORGET_S)

    def spend(self, seconds: float, now: float) -> None:
        self.balance = max(-MAX_DEBT_S, self.refresh(now) - seconds)
        self._recent, self._counted_at = self.recent(now) + seconds, now


class Turns:
    """Decides which account may use the event loop now. An object serves one loop and is used only from its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop, self._clock = loop, clock
        self._last, self._last_at = "", 0.0
        self._shared_until = 0.0
        self._heaviest: Usage | None = None
        self.usages: dict[str, Usage] = {}
        """The accounts that have used the loop since one account last had it alone."""

    def wait(self, who: str) -> asyncio.Future[None] | None:
        """Ask for a step of this account. Returns None if it may run at once, else a future to await, or to cancel to
        give up."""
        self._last_at = now = self._clock()
        if who != self._last:
            self._changed(who, now)
        if now >= self._shared_until:
            return None
        usage = self.usages.get(who)
        if usage is None or (not usage.waiting and self._may_go(usage, now)):
            return None
        future = self._loop.create_future()
        usage.waiting.append(future)
        if usage.timer is None:
            self._set_timer(usage, now)
        return future

    @property
    def is_shared(self) -> bool:
        """Whether more than one account is active."""
        return self._clock() < self._shared_until

    def is_active_besides(self, who: str) -> bool:
        """Whether another account is active. May be called from any thread."""
        now = self._clock()
        return now < self._shared_until or (self._last not in ("", who) and now < self._last_at + ACTIVE_S)

    def spend(self, who: str, seconds: float) -> None:
        """Charge a step to this account. Called only while others are active."""
        now = self._clock()
        usage = self.usages.get(who)
        if usage is None:
            usage = self.usages[who] = Usage(now)
        usage.spend(seconds, now)
        if self._heaviest is None or usage.recent(now) > self._heaviest.recent(now):
            self._heaviest = usage

    def _changed(self, who: str, now: float) -> None:
        if self._last:
            if now >= self._shared_until:  # all start afresh, except accounts that a timer is about to wake
                self.usages = {each: usage for each, usage in self.usages.items() if usage.waiting}
                self._heaviest = None
            self._shared_until = now + ACTIVE_S
        self._last = who

    def _may_go(self, usage: Usage, now: float) -> bool:
        if usage.refresh(now) >= 0 or self._heaviest is None:
            return True
        return usage.recent(now) < HEAVY * self._heaviest.recent(now)

    def _set_timer(self, usage: Usage, now: float) -> None:
        paid_s = max(0.0, -usage.balance) / PART
        alone_s = max(0.0, self._shared_until - now)
        usage.timer = self._loop.call_later(min(paid_s, alone_s), self._grant, usage)

    def _grant(self, usage: Usage) -> None:
        """Let the next step of an account run if it has paid its debt, or all its steps if no other account is
        active."""
        usage.timer = None
        now = self._clock()
        alone = now >= self._shared_until
        if alone or self._may_go(usage, now):
            while usage.waiting:
                future = usage.waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    if not alone:
                        break
        if usage.waiting:
            self._set_timer(usage, now)


class _Steps:
    """Drives a coroutine step by step."""

    def __init__(self, turns: Turns, work: Coroutine[Any, Any, Any]) -> None:
        self._turns, self._work = turns, work

    def __await__(self) -> Generator[Any, None, Any]:
        turns, work = self._turns, self._work
        error: BaseException | None = None
        owed_s = 0.0  # for steps before the account was known, which identify the caller
        try:
            while True:
                began = time.perf_counter() if turns.is_shared else 0.0
                try:
                    awaited = work.send(None) if error is None else work.throw(error)
                except StopIteration as end:
                    return end.value
                finally:
                    who = account.get()  # the step itself may have set it
                    if began:
                        owed_s += time.perf_counter() - began
                    if owed_s and who:
                        turns.spend(who, owed_s)
                        owed_s = 0.0
                error = None
                try:
                    yield awaited
                    if who and (turn := turns.wait(who)) is not None:
                        yield from turn
                except GeneratorExit:
                    raise
                except BaseException as thrown:  # the task was cancelled, or what it awaited failed
                    error = thrown
        finally:
            error = None  # avoids a reference cycle between the error and this frame
            work.close()


async def _drive(turns: Turns, work: Coroutine[Any, Any, Any]) -> Any:
    return await _Steps(turns, work)


turns_of: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


class BodyWeight:
    """A pure ASGI middleware that charges the bytes of bodies as time of the loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turns = turns_of.get(asyncio.get_running_loop())
        if turns is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def weigh(message: Message) -> Message:
            size, who = len(message.get("body", b"")), account.get()
            if size and who and turns.is_shared:
                turns.spend(who, size * BYTE_S)
            return message

        async def weighed_receive() -> Message:
            return weigh(await receive())

        async def weighed_send(message: Message) -> None:
            await send(weigh(message))

        await self._app(scope, weighed_receive, weighed_send)


def take_turns(loop: asyncio.AbstractEventLoop) -> Turns:
    """Let every task that is created in this loop from now on take turns."""
    turns = turns_of[loop] = Turns(loop)

    def make(
        loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_drive(turns, work), loop=loop, context=context, **options)

    loop.set_task_factory(make)
    return turns
