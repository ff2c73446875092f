"""Pause and resume sandboxes: because the user asks for it, because they are idle, or to make room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.cancellation import finish
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import Pausable, checkpointing
from atoll.errors import SandboxError, SandboxGoneError, StartError, UnsupportedError
from atoll.manager.capacity import Capacity
from atoll.manager.context import ManagerContext
from atoll.manager.health import Health
from atoll.manager.members import Member
from atoll.manager.record import Operation, PausedBy
from atoll.manager.tasks import outcome
from atoll.model import Capability, Cause, Handle, State
from atoll.sandbox.hooks import HOOK_S
from atoll.tracing import span

_PAUSE_S = 30.0
_DISK_S = 180.0
_Work = Callable[[Handle], Awaitable[None]]


class Pauser:
    def __init__(self, context: ManagerContext, capacity: Capacity, health: Health) -> None:
        self._context = context
        self._capacity = capacity
        self._health = health

    async def pause(
        self,
        member: Member,
        *,
        disk: bool = False,
        drop_connections: bool = False,
        by: PausedBy = PausedBy.USER,
    ) -> None:
        """Stop all processes of the sandbox where they are. Raises UnsupportedError where the engine cannot pause. May
        be repeated.

        With `disk` the paused sandbox uses no memory. Connections to the outside prevent this unless `drop_connections`
        is given.
        """
        await self._context.engines.describe(member.record.engine)
        self._engine(member)
        if not disk:
            if await self._reaches(member, State.RUNNING, State.PAUSED):
                await outcome(self.begin(member, by))
            elif by is PausedBy.USER and member.record.paused_by is not by:
                await self._context.transitions.correct(member, {"paused_by": by})
            return
        engine = await checkpointing(self._context.engine_of(member))
        if await self._reaches(member, State.RUNNING, State.PAUSED):
            await member.sandbox.let_go_of_all(drop_connections)
        if await self._reaches(member, State.RUNNING, State.PAUSED):
            if by is PausedBy.IDLE and member.usage.active:
                return  # it is in use again
            await self._hibernate(member, engine, by)

    async def move_to_disk(self, member: Member) -> None:
        """Move the memory of a paused sandbox to the disk. Its connections, which have been silent since the pause, are
        closed."""
        engine = await checkpointing(self._context.engine_of(member))
        if not await self._reaches(member, State.RUNNING, State.PAUSED):
            await self._hibernate(member, engine, member.record.paused_by)

    async def resume(self, member: Member) -> None:
        """Let the sandbox's processes go on. Raises LimitReachedError when there is no room for it. May be repeated."""
        await self._context.engines.describe(member.record.engine)
        engine = self._engine(member)
        while await self._reaches(member, State.PAUSED, State.RUNNING):
            if not self._capacity.is_free_for_waking():
                await self._capacity.make_room(member.record.owner, waking=True)
                continue  # another caller may have resumed it meanwhile, or taken the room
            written = self._context.transitions.change(member, act=Operation.RESUME)
            work = self._carry_out(member, State.RUNNING, written, self._resuming(member, engine), _PAUSE_S + HOOK_S)
            await outcome(self._context.tasks.spawn(work, f"resume {member.id}"))
            member.usage.touch()

    def begin(self, member: Member, by: PausedBy) -> asyncio.Task[None]:
        """Pause a usable sandbox in a task that goes on if the caller is cancelled."""
        engine = self._engine(member)
        work = self._carry_out(member, State.PAUSED, self._write_down(member, by), engine.pause, by=by)
        return self._context.tasks.spawn(work, f"pause {member.id}")

    def _resuming(self, member: Member, engine: Pausable) -> _Work:
        """Return what resumes a sandbox and, if its memory was on the disk, runs the hook of its image."""

        async def resume(handle: Handle) -> None:
            tasks, was_on_disk = self._context.tasks, member.on_disk
            await tasks.bounded(engine.resume(handle), _PAUSE_S, f"resume {member.id}")
            if was_on_disk:
                try:
                    await member.sandbox.run_hook("restored")
                except StartError as error:  # the sandbox goes on
                    self._context.transitions.note(member, Cause.EXIT, error.reason)

        return resume

    def _write_down(self, member: Member, by: PausedBy | None) -> asyncio.Future[None]:
        """Write down that the sandbox is about to be paused, and by whom. If this process fails or dies, the sandbox
        may be paused all the same, and then the next manager needs to know."""
        update = {} if by is None else {"paused_by": by}
        return self._context.transitions.change(member, act=Operation.PAUSE, update=update)

    async def _hibernate(self, member: Member, engine: Checkpointing, by: PausedBy | None) -> None:
        """Pause a running or paused sandbox so that its memory is on the disk."""

        async def hibernate(handle: Handle) -> None:
            await member.sandbox.let_go()
            await engine.hibernate(handle)
            member.on_disk = True

        work = self._carry_out(member, State.PAUSED, self._write_down(member, by), hibernate, _DISK_S, by=by)
        await outcome(self._context.tasks.spawn(work, f"pause {member.id} to disk"))

    async def _carry_out(
        self,
        member: Member,
        goal: State,
        written: asyncio.Future[None],
        work: _Work,
        seconds: float = _PAUSE_S,
        *,
        by: PausedBy | None = None,
    ) -> None:
        context = self._context

        async def both() -> None:
            await written
            title = "manager.pause_sandbox" if goal is State.PAUSED else "manager.resume_sandbox"
            with span(title, sandbox_id=member.id):
                await work(member.record.handle())

        try:
            await context.tasks.bounded(both(), seconds, f"bring {member.id} to {goal}")
        except BaseException as error:
            await finish(self._give_up(member, error))
            raise
        reason = "its processes are stopped" if goal is State.PAUSED else ""
        member.paused_since = context.clock.now()
        member.on_disk = member.on_disk and goal is State.PAUSED
        member.stays_in_memory = False
        update = {"paused_by": by, "paused_at": context.clock.wall() if by is not None else None}
        await context.transitions.change(member, goal, reason=reason, update=update)

    async def _give_up(self, member: Member, error: BaseException) -> None:
        transitions = self._context.transitions
        try:
            await transitions.change(member)  # no operation is in progress any more
            await self._health.look(member)
            # If the engine cannot report the state, the pause may still take effect, so who asked for it is kept.
            if member.record.state not in (State.PAUSED, State.ERROR) and member.record.paused_by is not None:
                await transitions.correct(member, {"paused_by": None})
        except SandboxError as another:
            error.add_note(f"and then: {another}")

    async def _reaches(self, member: Member, before: State, goal: State) -> bool:
        """Wait until no operation is in progress on the sandbox. Returns whether it still has to be brought from
        `before` to `goal`. Raises SandboxGoneError if it is in neither state."""
        while not member.free and not member.is_being_deleted:
            await member.changed()
        record = member.record
        if record.state is goal and not member.is_being_deleted:
            return False
        if record.state is not before or member.is_being_deleted:
            cause = record.cause.value if record.cause else "unknown"
            raise SandboxGoneError(f"sandbox {member.id} is {record.state}, not {before}: {record.reason}", cause=cause)
        return True

    def _engine(self, member: Member) -> Pausable:
        engine = self._context.engine_of(member)
        if not isinstance(engine, Pausable) or not self._context.engines.declares(engine.name, Capability.PAUSE):
            raise UnsupportedError(f"engine '{engine.name}' cannot pause a sandbox", hint="Choose another engine.")
        return engine
