"""Fork sandboxes: either all that were requested, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.cancellation import finish
from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import checkpointing
from atoll.errors import ConflictError, EngineError, SandboxError
from atoll.manager.capacity import Capacity
from atoll.manager.context import ManagerContext
from atoll.manager.members import Creation, Member
from atoll.manager.operations.create import Creator
from atoll.manager.record import Operation
from atoll.manager.request import Request
from atoll.manager.supervisor import MemberFactory
from atoll.model import Handle, State
from atoll.tracing import span

_MEMORY_S = 120.0
"""How much longer a fork may take if it includes memory."""


class Forker:
    def __init__(self, context: ManagerContext, factory: MemberFactory, capacity: Capacity, creator: Creator) -> None:
        self._context = context
        self._factory = factory
        self._capacity = capacity
        self._creator = creator

    async def fork(
        self,
        source: Member,
        requests: Sequence[Request],
        checkpoint: str | None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[Member]:
        """Return running sandboxes that start from the state of `source`. Names, keys, room and cancelled callers are
        handled as by `Creator.create`."""
        engine = await checkpointing(self._context.engine_of(source))
        with span("manager.fork_sandbox", sandbox_id=source.id, count=len(requests)):
            async with source.sandbox.use():
                if memory:
                    await source.sandbox.let_go_of_all(drop_connections)
                members = await self._begin(source, engine, requests, checkpoint, memory)
                for member in members:
                    await self._creator.join(member)
        return members

    async def _begin(
        self,
        source: Member,
        engine: Checkpointing,
        requests: Sequence[Request],
        checkpoint: str | None,
        memory: bool,
    ) -> list[Member]:
        while True:
            known = self._known(requests)
            if known:
                return known
            self._capacity.check_owner(requests[0].owner, len(requests))
            if self._capacity.is_free(len(requests)):
                break
            await self._capacity.make_room(requests[0].owner, len(requests))
        context, members, written = self._context, [], []
        for request in requests:
            record = request.record(context).model_copy(update={"env": source.record.env})
            member = self._factory.new(record)
            context.members.add(member)
            members.append(member)
            written.append(context.transitions.change(member, State.STARTING, act=Operation.CREATE))
        work = self._make(source, engine, members, written, checkpoint, memory)
        task = context.tasks.spawn(work, f"fork {source.id}")
        for member in members:
            member.creation = Creation(task)
        return members

    def _known(self, requests: Sequence[Request]) -> list[Member]:
        """Return the forks that the same request made before. Raises ConflictError if some of them no longer exist."""
        found = [self._creator.existing(request) for request in requests]
        known = [member for member in found if member is not None]
        if known and len(known) < len(found):
            raise ConflictError("some of these forks have been deleted", hint="Use a new key.")
        return known

    async def _make(
        self,
        source: Member,
        engine: Checkpointing,
        members: list[Member],
        written: list[asyncio.Future[None]],
        checkpoint: str | None,
        memory: bool,
    ) -> None:
        context = self._context
        try:
            for each in written:
                await each
            if memory:
                await source.sandbox.let_go()
            work = engine.fork(
                source.record.handle(),
                [member.id for member in members],
                checkpoint,
                memory=memory,
                labels=[member.record.spec.labels for member in members],
            )
            seconds = context.rules.create_s * (1 + len(members) / 10) + (_MEMORY_S if memory else 0)
            handles = await context.tasks.bounded(work, seconds, f"fork {source.id}")
            pairs = zip(members, handles, strict=True)
            done = await asyncio.gather(*(self._complete(*pair) for pair in pairs), return_exceptions=True)
            for failure in done:  # raised only now, when no task works any more on a fork that will be undone
                if failure is not None:
                    raise failure
        except BaseException as error:
            for member in members:
                await finish(self._creator.undo(member, error))
            if isinstance(error, Exception) and not isinstance(error, SandboxError):
                raise EngineError(f"Failed to fork sandbox {source.id}: {error!r}") from error
            raise
        finally:
            for member in members:
                self._creator.settle(member)

    async def _complete(self, member: Member, handle: Handle) -> None:
        await self._creator.hear_from(member, handle)
        await self._creator.begin(member, "forked")
        await self._creator.start_up(member)
        found = {"details": handle.details, "spec": handle.spec, **self._context.expiry(member.record.lifetime_s)}
        await self._context.transitions.change(member, State.RUNNING, update=found)
