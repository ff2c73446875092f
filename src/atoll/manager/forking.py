"""Members that begin as another is: all that were asked for, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.engines.base import Checkpointing, Engine
from atoll.errors import ConflictError, EngineError, SandboxError, UnsupportedError
from atoll.manager.core import Core
from atoll.manager.creating import ANSWER_S, Creating
from atoll.manager.members import Making, Member
from atoll.manager.record import Act
from atoll.manager.request import Request, expiry
from atoll.manager.room import Room
from atoll.manager.tasks import finish
from atoll.model import Capability, Handle, State

_MEMORY_S = 120.0
"""How much longer it may take with memory."""


class Forking:
    def __init__(self, core: Core, room: Room, creating: Creating) -> None:
        self._core = core
        self._room = room
        self._creating = creating

    async def twins(
        self, source: Member, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[Member]:
        """Without names or labels of their own."""
        requests = [Request.twin(source.record, checkpoint, memory) for _ in range(count)]
        return await self.fork(source, requests, checkpoint, memory=memory, drop_connections=drop_connections)

    async def fork(
        self,
        source: Member,
        requests: Sequence[Request],
        checkpoint: str | None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
    ) -> list[Member]:
        """Running sandboxes. Names, keys, room and callers who are cancelled are as for one that is created."""
        engine = checkpointing(self._core.engine_of(source))
        async with source.sandbox.use():
            if memory:
                await source.sandbox.let_go_of_all(drop_connections)
            members = await self._begin(source, engine, requests, checkpoint, memory)
            for member in members:
                await self._creating.join(member)
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
            self._room.check_owner(requests[0].owner, len(requests))
            if self._room.is_free(len(requests)):
                break
            await self._room.make(requests[0].owner, len(requests))
        core, members, written = self._core, [], []
        for request in requests:
            member = core.member(request.record(core).model_copy(update={"env": source.record.env}))
            core.members.add(member)
            members.append(member)
            written.append(core.ledger.change(member, State.STARTING, act=Act.CREATE))
        work = self._make(source, engine, members, written, checkpoint, memory)
        task = core.tasks.spawn(work, f"fork {source.id}")
        for member in members:
            member.making = Making(task)
        return members

    def _known(self, requests: Sequence[Request]) -> list[Member]:
        """Those that the same request made before. Raises ConflictError."""
        found = [self._creating.existing(request) for request in requests]
        known = [member for member in found if member is not None]
        if known and len(known) < len(found):
            raise ConflictError("some of these forks were deleted since", hint="Use a new key.")
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
        core = self._core
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
            seconds = core.rules.create_s * (1 + len(members) / 10) + (_MEMORY_S if memory else 0)
            handles = await core.tasks.bounded(work, seconds, f"fork {source.id}")
            pairs = zip(members, handles, strict=True)
            done = await asyncio.gather(*(self._complete(*pair) for pair in pairs), return_exceptions=True)
            for failure in done:  # only now: nobody is still at work on one that is undone
                if failure is not None:
                    raise failure
        except BaseException as error:
            for member in members:
                await finish(self._creating.undo(member, error))
            if isinstance(error, Exception) and not isinstance(error, SandboxError):
                raise EngineError(f"Failed to fork sandbox {source.id}: {error!r}") from error
            raise
        finally:
            for member in members:
                member.making = None
                member.notify()
                core.noticed(member)
                if member.doomed:
                    core.ending.on_failure()

    async def _complete(self, member: Member, handle: Handle) -> None:
        core = self._core
        member.sandbox.adopt(handle)
        await core.tasks.bounded(member.sandbox.answer(), ANSWER_S, f"hear from {member.id}")
        found = {"details": handle.details, "spec": handle.spec, **expiry(core, member.record.lifetime_s)}
        await core.ledger.change(member, State.RUNNING, update=found)


def checkpointing(engine: Engine) -> Checkpointing:
    """Raises UnsupportedError if it cannot keep states."""
    if Capability.CHECKPOINTS not in engine.capabilities or not isinstance(engine, Checkpointing):
        raise UnsupportedError(
            f"engine '{engine.name}' cannot keep states of a sandbox here",
            hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
        )
    return engine
