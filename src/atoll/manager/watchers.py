"""Turn what happens inside sandboxes into events: the end of the command that a sandbox was made for, and refused
connections. No caller waits for these."""

from __future__ import annotations

import asyncio
import logging

from atoll.engines.contract import NetworkPolicies
from atoll.errors import SandboxError
from atoll.guest.guest import Guest
from atoll.manager.context import ManagerContext
from atoll.manager.health import Health
from atoll.manager.members import Member
from atoll.manager.record import CommandEnd
from atoll.model import Cause, State
from atoll.sandbox.command import shell_exit_code
from atoll.token_bucket import TokenBucket

_FIRST_S, _MAX_S = 0.1, 15.0
_AT_ONCE = 8
_KEPT_BYTES = 2000
_EVERY_S = 1.0
_BURST, _RATE = 20.0, 0.1
_log = logging.getLogger(__name__)


class CommandWatcher:
    """Reports the end of commands, which it polls for: often at first, because most commands that fail do so at once.

    Following the output instead would let a command that writes without end keep the manager busy. Paused sandboxes are
    not polled.
    """

    def __init__(self, context: ManagerContext, health: Health) -> None:
        self._context = context
        self._health = health
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def begin(self, member: Member, command_id: str) -> None:
        """Watch this command from now on, also after a restart of the manager. May be repeated."""
        if member.record.watched is None:
            await self._context.transitions.correct(member, {"watched": command_id})
            self._spawn(member)

    def go_on(self) -> None:
        """Watch the commands that an earlier manager watched."""
        for member in self._context.members:
            if member.record.watched is not None and member.record.command_end is None:
                self._spawn(member)

    def _spawn(self, member: Member) -> None:
        self._context.tasks.spawn(self._watch(member), f"watch the command of {member.id}")

    async def _watch(self, member: Member) -> None:
        wait = _FIRST_S
        while not member.is_being_deleted and self._context.members.find(member.id) is member:
            if member.usable:
                async with self._slots:
                    end = await self._ask(member)
                if end is not None:
                    await self._report(member, end)
                    return
            elif member.record.state is State.STOPPED:
                return  # the end of the sandbox says more than that of the command
            await self._context.clock.sleep(wait)
            wait = min(_MAX_S, wait * 2)

    async def _report(self, member: Member, end: CommandEnd) -> None:
        try:
            await self._context.transitions.correct(member, {"command_end": end})
            await self._context.transitions.note(member, end.cause, end.reason)
        except SandboxError as error:
            # Without the reason, which quotes the command's output.
            said = "the end of the command of sandbox %s cannot be recorded: %s"
            _log.warning(said, member.id, error, extra={"sandbox_id": member.id})

    async def _ask(self, member: Member) -> CommandEnd | None:
        """Return how the command ended, or None if it still runs or its state is unknown."""
        id = (member.record.watched or "").encode()

        async def end(guest: Guest) -> CommandEnd | None:
            now = self._context.clock.wall()
            found = [process for process in await guest.processes.list() if process.id == id]
            if not found:
                return CommandEnd(cause=Cause.LOST, at=now)
            if found[0].running:
                return None
            stream = await guest.processes.attach(id)
            output = b""
            async for piece in stream:
                output = (output + piece.data)[-_KEPT_BYTES:]
            exit = await stream.wait()
            text = output.decode(errors="replace")
            return CommandEnd(exit_code=shell_exit_code(exit), cause=exit.cause, output=text, at=now)

        try:
            return await self._health.ask(member, end, self._context.rules.inspect_s)
        except (SandboxError, OSError):
            return None


class RefusalWatcher:
    """Reports what the network policies of sandboxes refused.

    A sandbox decides how often it is refused, but all sandboxes share the events. The events of each are therefore
    limited in number, and further refusals are only in its network log.
    """

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self._reported: dict[str, tuple[float, TokenBucket]] = {}
        """By sandbox: the time up to which refusals were reported, and a bucket that limits further reports."""

    async def run(self) -> None:
        """Poll for refusals. Never returns."""
        began = self._context.clock.wall()
        while True:
            await asyncio.sleep(_EVERY_S)  # real time, not the manager's clock: refusals have timestamps of the machine
            members = [member for member in self._context.members if self._is_watched(member)]
            known = {member.id for member in members}
            self._reported = {id: reported for id, reported in self._reported.items() if id in known}
            for member in members:
                try:
                    await self._look(member, began)
                except (SandboxError, OSError) as error:
                    _log.debug(
                        "the refusals of sandbox %s cannot be read: %s",
                        member.id,
                        error,
                        extra={"sandbox_id": member.id},
                    )

    def _is_watched(self, member: Member) -> bool:
        engine = self._context.engine_of(member)
        return (
            member.record.state is State.RUNNING
            and member.sandbox.spec.network != "none"
            and engine.name != "remote"  # its server reports its own events
            and isinstance(engine, NetworkPolicies)
        )

    async def _look(self, member: Member, began: float) -> None:
        engine = self._context.engine_of(member)
        assert isinstance(engine, NetworkPolicies)
        until, bucket = self._reported.get(member.id) or (began, TokenBucket(_RATE, _BURST, self._context.clock.wall))
        found = [each for each in await engine.refusals(member.record.handle()) if each.time > until]
        if not found or member.record.state is not State.RUNNING:
            return
        granted = bucket.take_up_to(len(found))
        for refusal in found[:granted]:
            self._context.transitions.note(member, Cause.POLICY, f"network: {refusal}")
        if len(found) > granted >= 1:
            more = len(found) - granted
            reason = f"network: {more} more were refused; the network log lists them"
            self._context.transitions.note(member, Cause.POLICY, reason)
        self._reported[member.id] = (found[-1].time, bucket)
