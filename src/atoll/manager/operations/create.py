"""Create sandboxes: reserve a place, write that down, create the sandbox, write that down too. A failure at any point
leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from atoll.cancellation import ended, finish
from atoll.engines.contract import NetworkPolicies, Resizable, SetsUp
from atoll.engines.enforcement import given_limits
from atoll.errors import (
    ConflictError,
    EngineError,
    SandboxError,
    SandboxGoneError,
    SpecError,
    StateError,
    UnsupportedError,
)
from atoll.manager.capacity import Capacity
from atoll.manager.context import ManagerContext
from atoll.manager.members import Creation, Member
from atoll.manager.operations.delete import FIRST_RETRY_S, Deleter
from atoll.manager.pool import Pools
from atoll.manager.record import Operation
from atoll.manager.request import Request
from atoll.manager.schedule import Schedule
from atoll.manager.supervisor import MemberFactory
from atoll.model import Capability, Cause, Handle, Limits, State
from atoll.sandbox import setup
from atoll.sandbox.hooks import HOOK_S, Hook, hook_of_new
from atoll.sandbox.prewarm import KEEP_S
from atoll.tracing import span, traced
from atoll.workers import Shares

_ANSWER_S = 30.0


class Creator:
    def __init__(
        self,
        context: ManagerContext,
        schedule: Schedule,
        factory: MemberFactory,
        pools: Pools,
        capacity: Capacity,
        deleter: Deleter,
    ) -> None:
        self._context = context
        self._schedule = schedule
        self._factory = factory
        self._pools = pools
        self._capacity = capacity
        self._deleter = deleter
        self._starting = Shares(context.rules.max_starting, max(1, context.rules.max_starting // 4))

    async def create(self, request: Request, *, or_get: bool = False) -> str:
        """Return the id of a running sandbox for this request. If the last caller that waits for it is cancelled, so is
        the creation."""
        started = self._context.clock.now()
        with span("manager.create_sandbox") as current:
            await self._check_pausable(request)
            member = self.existing(request, or_get)
            if member is None:
                member = await self._begin(request, or_get)
            current.set(sandbox_id=member.id, engine=member.record.engine)
            await self.join(member)
        self._context.metrics.create_s.add(self._context.clock.now() - started)
        return member.id

    async def _check_pausable(self, request: Request) -> None:
        name = request.engine or self._context.engines.name_for(request.spec)
        description = await self._context.engines.describe(name)
        if request.on_idle not in (None, "end") and Capability.PAUSE not in description.capabilities:
            raise UnsupportedError(
                f"engine '{name}' cannot pause idle sandboxes", hint="Leave out on_idle, or use on_idle='end'."
            )

    @traced("manager.make_spare")
    async def make_spare(self, request: Request) -> Member | None:
        """Create a spare for a pool. Returns None when there is no room, or when the spare was deleted to make room."""
        if not self._capacity.is_free() or self._capacity.waiting or self._context.closing:
            return None
        member = self._add(request)
        try:
            await self.join(member)
        except SandboxGoneError:
            if member.is_being_deleted:
                return None
            raise
        return member

    # --- deciding, between two awaits -----------------------------------------------------------------------------

    async def _begin(self, request: Request, or_get: bool) -> Member:
        spare = await self._pools.take(request)
        try:
            while True:
                self._context.refuse_if_closing()
                member = self.existing(request, or_get)
                if member is not None:
                    return member
                self._capacity.check_owner(request.owner)
                if spare is not None and spare.usable:
                    member, spare = spare, None
                    self._hand_over(member, request)
                    return member
                if self._capacity.is_free():
                    return self._add(request)
                await self._capacity.make_room(request.owner)
        finally:
            if spare is not None:
                self._pools.put_back(spare)

    def existing(self, request: Request, or_get: bool = False) -> Member | None:
        self._context.refuse_if_closing()
        members = self._context.members
        member = members.keyed(request.owner, request.key) if request.key is not None else None
        if member is not None and member.record.fingerprint != request.fingerprint:
            raise ConflictError(f"the key {request.key!r} was used for another request", hint="Use a new key.")
        if member is None and request.name is not None:
            member = members.named(request.owner, request.name)
            if member is not None and not or_get:
                raise ConflictError(
                    f"there is already a sandbox named {request.name!r}", hint=f"Its id is {member.id}."
                )
        if member is not None and member.is_being_deleted:
            raise ConflictError(f"sandbox {member.id} is being deleted", hint="Try again in a moment.")
        return member

    def _add(self, request: Request) -> Member:
        member = self._factory.new(request.record(self._context))
        self._context.members.add(member)
        return self._start(member, self._context.transitions.change(member, State.STARTING, act=Operation.CREATE))

    def _hand_over(self, member: Member, request: Request) -> None:
        """Give a spare to the caller of this request."""
        old = member.record.spec.env
        extra = {name: value for name, value in request.spec.env.items() if old.get(name) != value}
        update = {"env": extra, **request.ownership_fields(self._context)}
        spec = member.record.spec
        limits = request.spec.limits.model_copy(update={"lifetime_s": None})
        wanted = spec.model_copy(update={"limits": limits, "network": request.spec.network})
        if wanted != spec:
            update["spec"] = wanted
        # Until its new limits and policy are in force it counts as being created, as a new sandbox would.
        act = Operation.CREATE if wanted != spec else None
        written = self._context.transitions.change(
            member, act=act, reason="it was claimed from its pool", update=update
        )
        member.sandbox.configure(extra, request.timeout_s)
        member.usage.touch()
        self._context.members.register(member)
        self._start(member, written)

    def _start(self, member: Member, written: asyncio.Future[None]) -> Member:
        member.creation = Creation(self._context.tasks.spawn(self._make(member, written), f"create {member.id}"))
        return member

    # --- waiting and doing ----------------------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        creation = member.creation
        if creation is None:
            return
        creation.waiters += 1
        try:
            await asyncio.wait({creation.task})
        except asyncio.CancelledError:
            alone = creation.waiters == 1 and not creation.acknowledged
            if alone and not creation.task.done():
                creation.task.cancel()
                await ended(creation.task)
            elif alone and not creation.task.cancelled() and creation.task.exception() is None:
                # It became ready just as the last caller was cancelled, so nobody would learn its id.
                await ended(self._deleter.begin(member, Cause.USER, "its caller was gone"))
            raise
        finally:
            creation.waiters -= 1
        if creation.task.cancelled():
            raise SandboxGoneError(f"sandbox {member.id} was deleted before it was ready", cause=Cause.USER)
        creation.task.result()
        creation.acknowledged = True

    async def _make(self, member: Member, written: asyncio.Future[None]) -> None:
        try:
            await written
            if member.record.state is State.STARTING:
                async with self._starting.slot(member.record.owner or ""):
                    handle = await self._in_engine(member)
                await self.begin(member, hook_of_new(member.sandbox.access))
                await self._set_up(member)  # outside the slot: one user's setup may take long while others wait
                await self.start_up(member)
                if member.record.spec.prewarm is not None:
                    await self._context.tasks.bounded(member.sandbox.keep_ready(), KEEP_S, f"keep {member.id} ready")
                await self._ready(member, handle)
            else:
                with span("manager.claim_spare", sandbox_id=member.id):
                    if member.record.act is Operation.CREATE:  # without an operation it is ready already
                        await self._adapt(member)
        except BaseException as error:
            await finish(self.undo(member, error))
            if isinstance(error, SandboxError):
                error.reason = f"Failed to create sandbox: {error.reason}"
            elif isinstance(error, Exception):
                raise EngineError(f"Failed to create sandbox: {error!r}") from error
            raise
        finally:
            self.settle(member)

    def settle(self, member: Member) -> None:
        """End the creation, whether the sandbox was made or undone, and wake the callers that wait for it."""
        member.creation = None
        member.notify()
        self._schedule.notice(member)
        if member.is_being_deleted:
            self._schedule.hurry()

    async def _in_engine(self, member: Member) -> Handle:
        context = self._context
        engine, spec = context.engine_of(member), member.record.spec
        seconds = context.rules.create_s
        if isinstance(engine, SetsUp):
            seconds += (spec.setup_timeout_s if spec.setup else 0.0) + (spec.ready.timeout_s if spec.ready else 0.0)
        handle = await context.tasks.bounded(engine.create(member.id, spec), seconds, f"create {member.id}")
        await self.hear_from(member, handle)
        return handle

    async def hear_from(self, member: Member, handle: Handle) -> None:
        """Return when the agent of a new sandbox has answered."""
        member.sandbox.adopt(handle)
        await self._context.tasks.bounded(member.sandbox.answer(), _ANSWER_S, f"hear from {member.id}")

    async def begin(self, member: Member, hook: Hook) -> None:
        """Prepare a new sandbox and run the hook, if its image has it."""
        work = member.sandbox.begin(hook)
        await self._context.tasks.bounded(work, HOOK_S + _ANSWER_S, f"run a hook of {member.id}")

    async def _set_up(self, member: Member) -> None:
        spec = member.sandbox.spec  # with what the engine decided about it
        if setup.is_needed(spec):
            work = member.sandbox.set_up()
            await self._context.tasks.bounded(work, spec.setup_timeout_s + _ANSWER_S, f"set up {member.id}")

    async def start_up(self, member: Member) -> None:
        """Start the start commands of a new sandbox and wait until it is ready."""
        plan = member.sandbox.access.start_plan()
        if plan.is_needed:
            seconds = _ANSWER_S * 2 + plan.ready_s
            await self._context.tasks.bounded(member.sandbox.start_up(), seconds, f"start up {member.id}")

    async def _ready(self, member: Member, handle: Handle) -> None:
        context = self._context
        life = context.expiry(member.record.lifetime_s)  # counted from now, however long the creation took
        spec = member.record.spec.settled(handle.spec)
        await context.transitions.change(
            member, State.RUNNING, update={"details": handle.details, "spec": spec, **life}
        )

    async def _adapt(self, member: Member) -> None:
        """Give a claimed spare the limits and the network policy of its record."""
        context, engine = self._context, self._context.engine_of(member)
        was, handle = member.sandbox.spec, member.record.handle()
        wanted = handle.spec
        if wanted.limits != was.limits:
            assert isinstance(engine, Resizable)
            had = given_limits(was.limits)
            more = {name: value for name, value in given_limits(wanted.limits).items() if had.get(name) != value}
            setting = engine.set_limits(handle, Limits.model_validate(more))
            await context.tasks.bounded(setting, context.rules.inspect_s, "set limits")
        if wanted.network != was.network:
            assert isinstance(engine, NetworkPolicies)
            work = engine.set_network(handle, wanted.network)
            await context.tasks.bounded(work, context.rules.inspect_s, "set its network policy")
        member.sandbox.change(handle)
        await context.transitions.change(member)

    async def undo(self, member: Member, error: BaseException) -> None:
        """Undo a failed creation. How far it got is unknown, so whatever may exist is deleted, which is always safe."""
        context = self._context
        if isinstance(error, Exception):
            context.metrics.failures["create"] += 1
        await member.sandbox.let_go()
        reason = f"it was not made: {error}" if isinstance(error, Exception) else "its caller was gone"
        try:
            if member.record.act is None:
                # A claim is complete once it is written down. If it is undone before that, record it as an unfinished
                # creation.
                with suppress(StateError):
                    await context.transitions.change(member, act=Operation.CREATE, reason=reason)
            await member.sandbox.distrust_ready(error)
            if not isinstance(error, SpecError):
                work = context.engine_of(member).delete(member.record.handle())
                await context.tasks.bounded(work, context.rules.delete_s, f"undo {member.id}")
        except Exception as leftover:
            context.metrics.failures["cleanup"] += 1
            error.add_note(f"and cleaning up failed: {leftover}")
            member.is_being_deleted = True
            member.next_try = context.clock.now() + FIRST_RETRY_S
            why = f"it was not made, and what there is of it cannot be deleted: {leftover}"
            writing = context.transitions.change(
                member, State.ERROR, act=Operation.DELETE, cause=Cause.HOST, reason=why
            )
        else:
            writing = context.transitions.undo(member, reason)
        try:
            await writing
        except StateError as unwritten:
            error.add_note(f"and that was not written down: {unwritten}")
