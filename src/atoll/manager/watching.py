"""Notices the end of the command that a sandbox was made for: nobody else waits for it.

It asks from time to time, often at first, because most that fail do so at once. Following the output instead would let
a command that writes without end keep us busy. Asking is not a use, and one that sleeps is not asked.
"""

from __future__ import annotations

import asyncio
import logging

from atoll.command import shell_exit_code
from atoll.errors import SandboxError
from atoll.guest.guest import Guest
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.record import CommandEnd
from atoll.model import Cause, State

_FIRST_S, _LONGEST_S = 0.1, 15.0
_AT_ONCE = 8
_KEPT = 2000
_log = logging.getLogger(__name__)


class Watching:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def begin(self, member: Member, command_id: str) -> None:
        """From now on, also after a restart of ours. May be repeated."""
        if member.record.watched is None:
            await self._core.ledger.correct(member, {"watched": command_id})
            self._spawn(member)

    def go_on(self) -> None:
        """With those that an earlier manager watched."""
        for member in self._core.members:
            if member.record.watched is not None and member.record.command_end is None:
                self._spawn(member)

    def _spawn(self, member: Member) -> None:
        self._core.tasks.spawn(self._watch(member), f"watch the command of {member.id}")

    async def _watch(self, member: Member) -> None:
        wait = _FIRST_S
        while not member.doomed and self._core.members.find(member.id) is member:
            if member.usable:
                async with self._slots:
                    end = await self._ask(member)
                if end is not None:
                    await self._report(member, end)
                    return
            elif member.record.state is State.STOPPED:
                return  # its end says more than that of the command
            await self._core.clock.sleep(wait)
            wait = min(_LONGEST_S, wait * 2)

    async def _report(self, member: Member, end: CommandEnd) -> None:
        reason = end.reason
        try:
            await self._core.ledger.correct(member, {"command_end": end})
            await self._core.ledger.note(member, end.cause, reason)
        except SandboxError as error:
            _log.warning("cannot record that %s in sandbox %s: %s", reason, member.id, error)

    async def _ask(self, member: Member) -> CommandEnd | None:
        """None: it runs, or nobody can say."""
        core = self._core
        guest = Guest(lambda: core.engine_of(member).connect(member.record.handle()), connect_timeout_s=5.0)
        try:
            return await core.tasks.bounded(self._end(member, guest), core.rules.inspect_s, f"ask {member.id}")
        except (SandboxError, OSError):
            return None
        finally:
            await guest.aclose()

    async def _end(self, member: Member, guest: Guest) -> CommandEnd | None:
        id, now = (member.record.watched or "").encode(), self._core.clock.wall()
        found = [process for process in await guest.processes.list() if process.id == id]
        if not found:
            return CommandEnd(cause=Cause.LOST, at=now)
        if found[0].running:
            return None
        stream = await guest.processes.attach(id)
        output = b""
        async for piece in stream:
            output = (output + piece.data)[-_KEPT:]
        exit = await stream.wait()
        text = output.decode(errors="replace")
        return CommandEnd(exit_code=shell_exit_code(exit), cause=exit.cause, output=text, at=now)
