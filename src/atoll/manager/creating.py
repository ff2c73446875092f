"""How a member comes to be: reserve, write down, make, write down again. A failure at any point leaves nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from atoll.engines.base import NetworkPolicies, Resizable, SetsUp
from atoll.errors import (
    ConflictError,
    EngineError,
    SandboxError,
    SandboxGoneError,
    SpecError,
    StateError,
    UnsupportedError,
)
from atoll.manager.core import Core
from atoll.manager.ending import FIRST_RETRY_S
from atoll.manager.members import Making, Member
from atoll.manager.pools import Pools
from atoll.manager.record import Act
from atoll.manager.request import Request, expiry
from atoll.manager.room import Room
from atoll.manager.tasks import finish
from atoll.model import Capability, Cause, Handle, State
from atoll.sandbox import DEFAULT_TIMEOUT_S
from atoll.workers import Shares

ANSWER_S = 30.0


class Creating:
    def __init__(self, core: Core, room: Room, pools: Pools) -> None:
        self._core = core
        self._room = room
        self._pools = pools
        self._starting = Shares(core.rules.max_starting, max(1, core.rules.max_starting // 4))
        pools.make_spare = self.make_spare
        room.calm = pools.wake

    async def create(self, request: Request, *, or_get: bool = False) -> str:
        """The id of a running sandbox. When the last caller who waits for it is cancelled, so is it."""
        started = self._core.clock.now()
        self._check_pausable(request)
        member = self.existing(request, or_get)
        if member is None:
            member = await self._begin(request, or_get)
        await self.join(member)
        self._core.metrics.create_s.add(self._core.clock.now() - started)
        return member.id

    def _check_pausable(self, request: Request) -> None:
        if request.on_idle in (None, "end"):
            return
        engine = self._core.engines.get(request.engine or self._core.engines.name_for(request.spec))
        if Capability.PAUSE not in engine.capabilities:
            raise UnsupportedError(
                f"engine '{engine.name}' cannot pause idle sandboxes", hint="Leave out on_idle, or use on_idle='end'."
            )

    async def make_spare(self, request: Request) -> Member | None:
        """A new one for a pool; None when there is no room, or none any more."""
        if not self._room.is_free() or self._room.waiting or self._core.closing:
            return None
        member = self._add(request)
        try:
            await self.join(member)
        except SandboxGoneError:
            if member.doomed:
                return None
            raise
        return member

    # --- deciding, between two awaits -----------------------------------------------------------------------------

    async def _begin(self, request: Request, or_get: bool) -> Member:
        spare = await self._pools.take(request)
        try:
            while True:
                self._core.refuse_if_closing()
                member = self.existing(request, or_get)
                if member is not None:
                    return member
                self._room.check_owner(request.owner)
                if spare is not None and spare.usable:
                    member, spare = spare, None
                    self._hand_over(member, request)
                    return member
                if self._room.is_free():
                    return self._add(request)
                await self._room.make(request.owner)
        finally:
            if spare is not None:
                self._pools.put_back(spare)

    def existing(self, request: Request, or_get: bool = False) -> Member | None:
        self._core.refuse_if_closing()
        members = self._core.members
        member = members.keyed(request.owner, request.key) if request.key is not None else None
        if member is not None and member.record.fingerprint != request.fingerprint:
            raise ConflictError(f"the key {request.key!r} was used for another request", hint="Use a new key.")
        if member is None and request.name is not None:
            member = members.named(request.owner, request.name)
            if member is not None and not or_get:
                raise ConflictError(
                    f"there is already a sandbox named {request.name!r}", hint=f"Its id is {member.id}."
                )
        if member is not None and member.doomed:
            raise ConflictError(f"sandbox {member.id} is being deleted", hint="Try again in a moment.")
        return member

    def _add(self, request: Request) -> Member:
        member = self._core.member(request.record(self._core))
        self._core.members.add(member)
        return self._start(member, self._core.ledger.change(member, State.STARTING, act=Act.CREATE))

    def _hand_over(self, member: Member, request: Request) -> None:
        """A spare becomes that of the caller."""
        old = member.record.spec.env
        extra = {name: value for name, value in request.spec.env.items() if old.get(name) != value}
        update = {"env": extra, **request.belongings(self._core)}
        spec = member.record.spec
        limits = request.spec.limits.model_copy(update={"lifetime_s": None})
        wanted = spec.model_copy(update={"limits": limits, "network": request.spec.network})
        if wanted != spec:
            update["spec"] = wanted
        # Until its limits and its policy hold it is on its way, as a new one would be.
        act = Act.CREATE if wanted != spec else None
        written = self._core.ledger.change(member, act=act, reason="it was claimed from its pool", update=update)
        member.sandbox.env = extra
        member.sandbox.timeout_s = request.timeout_s or DEFAULT_TIMEOUT_S
        member.usage.touch()
        self._core.members.register(member)
        self._start(member, written)

    def _start(self, member: Member, written: asyncio.Future[None]) -> Member:
        member.making = Making(self._core.tasks.spawn(self._make(member, written), f"create {member.id}"))
        return member

    # --- waiting and doing ----------------------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        making = member.making
        if making is None:
            return
        making.waiters += 1
        try:
            await asyncio.wait({making.task})
        except asyncio.CancelledError:
            alone = making.waiters == 1 and not making.acknowledged
            if alone and not making.task.done():
                making.task.cancel()
                await finish(_over(making.task))
            elif alone and not making.task.cancelled() and making.task.exception() is None:
                # It became ready in the moment in which nobody was there any more to learn its id.
                await finish(_over(self._core.ending.begin(member, Cause.USER, "its caller was gone")))
            raise
        finally:
            making.waiters -= 1
        if making.task.cancelled():
            raise SandboxGoneError(f"sandbox {member.id} was deleted before it was ready", cause=Cause.USER)
        making.task.result()
        making.acknowledged = True

    async def _make(self, member: Member, written: asyncio.Future[None]) -> None:
        try:
            await written
            if member.record.state is State.STARTING:
                async with self._starting.slot(member.record.owner or ""):
                    handle = await self._in_engine(member)
                await self._set_up(member)  # in no slot: the commands of one user may take long, and others wait
                await self._ready(member, handle)
            elif member.record.act is Act.CREATE:  # a spare; without an act all is done
                await self._adapt(member)
        except BaseException as error:
            await finish(self.undo(member, error))
            if isinstance(error, SandboxError):
                error.reason = f"Failed to create sandbox: {error.reason}"
            elif isinstance(error, Exception):
                raise EngineError(f"Failed to create sandbox: {error!r}") from error
            raise
        finally:
            member.making = None
            member.notify()
            self._core.noticed(member)
            if member.doomed:
                self._core.ending.on_failure()

    async def _in_engine(self, member: Member) -> Handle:
        core = self._core
        engine, spec = core.engine_of(member), member.record.spec
        seconds = core.rules.create_s + (spec.setup_timeout_s if spec.setup and isinstance(engine, SetsUp) else 0.0)
        handle = await core.tasks.bounded(engine.create(member.id, spec), seconds, f"create {member.id}")
        member.sandbox.adopt(handle)
        await core.tasks.bounded(member.sandbox.answer(), ANSWER_S, f"hear from {member.id}")
        return handle

    async def _set_up(self, member: Member) -> None:
        spec = member.record.spec
        if spec.setup:
            work = member.sandbox.set_up()
            await self._core.tasks.bounded(work, spec.setup_timeout_s + ANSWER_S, f"set up {member.id}")

    async def _ready(self, member: Member, handle: Handle) -> None:
        core = self._core
        life = expiry(core, member.record.lifetime_s)  # from now on, however long it took
        spec = member.record.spec.model_copy(update={"image": handle.spec.image})  # an engine may have its own default
        await core.ledger.change(member, State.RUNNING, update={"details": handle.details, "spec": spec, **life})

    async def _adapt(self, member: Member) -> None:
        """Give a spare the limits and the policy that its record says."""
        core, engine = self._core, self._core.engine_of(member)
        was, handle = member.sandbox.spec, member.record.handle()
        wanted = handle.spec
        if wanted.limits != was.limits:
            assert isinstance(engine, Resizable)
            await core.tasks.bounded(engine.set_limits(handle, wanted.limits), core.rules.inspect_s, "set limits")
        if wanted.network != was.network:
            assert isinstance(engine, NetworkPolicies)
            work = engine.set_network(handle, wanted.network)
            await core.tasks.bounded(work, core.rules.inspect_s, "set its network policy")
        member.sandbox.change(handle)
        await core.ledger.change(member)

    async def undo(self, member: Member, error: BaseException) -> None:
        """It is not known how far it came, so whatever may be there is deleted, which is always safe."""
        core = self._core
        if isinstance(error, Exception):
            core.metrics.failures["create"] += 1
        await member.sandbox.let_go()
        reason = f"it was not made: {error}" if isinstance(error, Exception) else "its caller was gone"
        try:
            if member.record.act is None:
                # A claim is done as soon as it is written down; given up before that, it is one that never was.
                with suppress(StateError):
                    await core.ledger.change(member, act=Act.CREATE, reason=reason)
            if not isinstance(error, SpecError):
                work = core.engine_of(member).delete(member.record.handle())
                await core.tasks.bounded(work, core.rules.delete_s, f"undo {member.id}")
        except Exception as leftover:
            core.metrics.failures["cleanup"] += 1
            error.add_note(f"and cleaning up failed: {leftover}")
            member.doomed = True
            member.next_try = core.clock.now() + FIRST_RETRY_S
            why = f"it was not made, and what there is of it cannot be deleted: {leftover}"
            writing = core.ledger.change(member, State.ERROR, act=Act.DELETE, cause=Cause.HOST, reason=why)
        else:
            writing = core.ledger.undo(member, reason)
        try:
            await writing
        except StateError as unwritten:
            error.add_note(f"and that was not written down: {unwritten}")


async def _over(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
