"""Many sandboxes in one process: made side by side, ended when idle, and still there after a crash."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from atoll.engines.base import Checkpointing, LimitDefaults, OnImageProgress
from atoll.errors import SandboxNotFoundError
from atoll.export import Export
from atoll.guest.guest import Guest
from atoll.manager.forking import checkpointing
from atoll.manager.journal_tables import Search
from atoll.manager.lookup import called
from atoll.manager.members import Member
from atoll.manager.opening import Opening
from atoll.manager.record import Event, OnIdle, Record
from atoll.manager.request import Config, Request, expiry, fork_key
from atoll.manager.sandbox import ManagedSandbox
from atoll.model import Cause, Limits, SandboxSpec, State, Stats
from atoll.sandbox import lease_seconds

T = TypeVar("T")


class SandboxManager(Opening):
    """The sandboxes of one state directory.

    Belongs to one event loop; use it as an async context manager. The first use opens the state directory and recovers
    what an earlier manager left. All times are in seconds.
    """

    # --- sandboxes ------------------------------------------------------------------------------------------------

    async def create_sandbox(
        self,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        lifetime: float | None = None,
        timeout: float | None = None,
        key: str | None = None,
        engine: str | None = None,
        idle_timeout: float | None = None,
        on_idle: OnIdle | None = None,
        services: Sequence[int] = (),
        task_id: str | None = None,
        setup: Sequence[str] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> str:
        """Make a sandbox, or claim one from a pool; returns its id when it answers.

        A name is taken once for each owner: ConflictError. Asking again with the same idempotency `key` and the same
        request gives the same sandbox. LimitReachedError when there is no room. `timeout` is how long a command may
        take by default; `engine` the name of another engine than the manager's own. `idle_timeout` and `on_idle`
        default to those of the manager; while something listens on one of the ports `services`, the sandbox is not
        ended for being idle. Named `ports` are services too, and variables inside: `NAME=PORT`. `task_id` is the task
        that it is for, and stands for its id as a name does. `setup` are command lines that run before it is given out.
        Cancelling leaves nothing behind.

        `config` may be an object with the names of a spec, or as the Manus example has it.
        """
        if ports:
            env = {**{name: str(port) for name, port in ports.items()}, **(env or {})}
            services = (*services, *ports.values())
        request = Request.of(
            config,
            volume_bindings,
            labels=labels,
            env=env,
            name=name,
            owner=owner,
            key=key,
            lifetime=lifetime,
            timeout=timeout,
            engine=engine,
            idle_timeout=idle_timeout,
            on_idle=on_idle,
            services=services,
            task_id=task_id,
            setup=setup,
        )
        return await self._create(request, or_get=False)

    async def get_or_create(
        self,
        name: str,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        *,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        lifetime: float | None = None,
        timeout: float | None = None,
        engine: str | None = None,
    ) -> str:
        """The id of the owner's sandbox of that name, whatever it was made from; if there is none it is made."""
        request = Request.of(
            config,
            volume_bindings,
            labels=labels,
            env=env,
            name=name,
            owner=owner,
            key=None,
            lifetime=lifetime,
            timeout=timeout,
            engine=engine,
        )
        return await self._create(request, or_get=True)

    async def get_sandbox(self, sandbox_id: str, *, owner: str | None = None) -> ManagedSandbox:
        """The sandbox of that id, or the owner's of that name, or of the task of that id. SandboxNotFoundError (a
        KeyError) if there is none, saying why it ended if it has. With an owner, what is another's is not there;
        without one, names are those of sandboxes that nobody owns.

        Getting it is no use of it: whoever holds it long may find that it was ended. Using one that fell asleep wakes
        it; using one that was paused by `pause_sandbox` raises SandboxPausedError.
        """
        return (await self._called(sandbox_id, owner)).sandbox

    async def find_sandbox(self, name: str, *, owner: str | None = None) -> Record | None:
        """The owner's sandbox of that name, or of the task of that id. None: there is none."""
        member = called((await self._open()).core.members, name, owner)
        return None if member is None else member.record

    @contextlib.asynccontextmanager
    async def sandbox_operation(self, sandbox_id: str, *, exclusive: bool = False) -> AsyncIterator[ManagedSandbox]:
        """The sandbox, in use until the block ends. Blocks may overlap, but for those that are `exclusive`."""
        member = await self._called(sandbox_id, None)
        async with member.sandbox.use():
            if not exclusive:
                yield member.sandbox
                return
            async with member.exclusive:
                yield member.sandbox

    async def delete_sandbox(
        self,
        sandbox_id: str,
        *,
        grace: float = 0.0,
        owner: str | None = None,
        export: Export | str | Path | None = None,
    ) -> bool:
        """Delete it and everything in it. False: there is none, which is fine. Cancelling does not stop it.

        `sandbox_id` and `owner` are as for `get_sandbox`. With `grace` what is under way inside has so long to end by
        itself. With `export` what is in `/output` is copied to that directory first; if that fails, the sandbox stays.
        """
        core = (await self._open()).core
        member = core.members.find(sandbox_id) or called(core.members, sandbox_id, owner)
        if member is None or member.waits_in_pool or owner not in (None, member.record.owner):
            return False
        if export is not None and not member.doomed:
            await Export.of(export).run(member.sandbox)
        if grace > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await member.usage.quiet()
        await core.ending.delete(member, Cause.USER, "it was deleted")
        return True

    async def fork_sandbox(
        self,
        sandbox_id: str,
        count: int = 1,
        checkpoint: str | None = None,
        *,
        memory: bool = False,
        drop_connections: bool = False,
        names: Sequence[str] = (),
        labels: Sequence[Mapping[str, str]] = (),
        lifetime: float | None = None,
        key: str | None = None,
    ) -> list[str]:
        """The ids of new sandboxes of the same owner that begin as this one is, or was at a checkpoint: all, or none.

        `names` and `labels`, if given, are one for each; the other options are as for `create_sandbox`.
        """
        if count < 1 or any(len(each) not in (0, count) for each in (names, labels)):
            raise ValueError("count is at least 1, and names and labels are one for each")
        member = await self._member(sandbox_id)
        requests = [
            Request.twin(
                member.record,
                checkpoint,
                memory,
                name=names[number] if names else None,
                labels=labels[number] if labels else None,
                key=fork_key(key, number) if key is not None else None,
                lifetime=lifetime,
            )
            for number in range(count)
        ]
        forking = (await self._open()).core.forking
        made = await forking.fork(member, requests, checkpoint, memory=memory, drop_connections=drop_connections)
        return [each.id for each in made]

    async def saved_states(self) -> Checkpointing:
        """Where the snapshots of its engine are kept. UnsupportedError if it cannot keep any."""
        return checkpointing((await self._open()).core.engine)

    async def pause_sandbox(
        self, sandbox_id: str, *, memory: Literal["ram", "disk"] = "ram", drop_connections: bool = False
    ) -> None:
        """Stop its processes where they are. UnsupportedError where the engine cannot. May be repeated.

        With memory="disk" they take no memory meanwhile; connections to the outside are then in the way, or dropped.
        """
        member = await self._member(sandbox_id)
        pausing = (await self._open()).core.pausing
        await pausing.pause(member, disk=memory == "disk", drop_connections=drop_connections)

    async def resume_sandbox(self, sandbox_id: str) -> None:
        """Let its processes go on. LimitReachedError when there is no room for it."""
        member = await self._member(sandbox_id)
        await (await self._open()).core.pausing.wake(member)

    async def extend_lifetime(self, sandbox_id: str, seconds: float) -> Record:
        """It may live so long from now on, but never longer than `max_lifetime` from now."""
        if not seconds > 0:
            raise ValueError(f"a lifetime must be more than 0 seconds, not {seconds!r}")
        member, parts = await self._member(sandbox_id), await self._open()
        most = self._rules.max_lifetime
        times = expiry(parts.core, seconds if most is None else min(seconds, most))
        await parts.core.ledger.change(member, act=member.record.act, update=times)
        parts.reaper.hurry()
        return member.record

    async def keep_alive(self, sandbox_id: str, seconds: float) -> Record:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it."""
        wanted = lease_seconds(seconds)
        member = await self._member(sandbox_id)
        await (await self._open()).core.lease(member, wanted)
        return member.record

    async def watch_command(self, sandbox_id: str, command_id: str) -> None:
        """Report the end of this command of the sandbox, as an event and as `command_end` of its record."""
        member = await self._member(sandbox_id)
        await (await self._open()).watching.begin(member, command_id)

    def on_use(self, listener: Callable[[str], None]) -> None:
        """Call it with the id of a sandbox whenever a use of it begins. It must be quick. Before the first use only."""
        self._on_use = listener

    async def observe(self, sandbox_id: str, question: Callable[[Guest], Awaitable[T]], timeout: float) -> T:
        """What the sandbox's agent answers. Not a use of the sandbox; SandboxGoneError if it does not run."""
        member = await self._member(sandbox_id)
        return await (await self._open()).observing.ask(member, question, timeout)

    async def update(self, sandbox_id: str, change: Callable[[Record], Mapping[str, object]]) -> Record:
        """Change `labels`, `services` or `env` of its record. `change` gets the record and returns what is new; nothing
        comes in between. Variables hold for commands that are started afterwards."""
        member = await self._member(sandbox_id)
        return await (await self._open()).observing.update(member, change)

    async def report(self, sandbox_id: str, kind: str, messages: Sequence[tuple[str, str]]) -> None:
        """Add events of this kind that change nothing: each has a reason, and data as JSON."""
        member = await self._member(sandbox_id)
        await (await self._open()).observing.report(member, kind, messages)

    async def recall(self, sandbox_id: str) -> Record | None:
        """What is written down of a sandbox that exists, without asking its engine."""
        member = (await self._open()).core.members.find(sandbox_id)
        return None if member is None or member.waits_in_pool else member.record

    async def cleanup_idle(self) -> None:
        """Do now what the cleanup task does from time to time, and wait until it is done."""
        await asyncio.gather(*await (await self._open()).reaper.sweep(), return_exceptions=True)

    async def ensure_image(self, image: str, *, engine: str | None = None) -> bool:
        """Whether sandboxes can be made from this image. One that is missing is pulled or built now."""
        return await (await self._open()).queries.ensure_image(image, engine)

    async def default_image(self) -> str:
        """The image of a sandbox that names none."""
        return (await self._open()).queries.default_image()

    async def fetch_image(
        self, image: str, *, engine: str | None = None, on_progress: OnImageProgress | None = None
    ) -> None:
        """As `ensure_image`, but says how far it is, and raises ImageError with the reason if it cannot be had."""
        await (await self._open()).queries.fetch_image(image, engine, on_progress)

    # --- knowing --------------------------------------------------------------------------------------------------

    async def default_limits(self, spec: SandboxSpec, *, engine: str | None = None) -> Limits:
        """The limits of a sandbox of this spec where it asks for none. SandboxError if its engine cannot say."""
        parts = await self._open()
        found = parts.core.engines.get(engine or parts.core.engines.name_for(spec))
        return (await found.default_limits(spec)).limits if isinstance(found, LimitDefaults) else Limits()

    async def list_sandboxes(
        self,
        *,
        state: State | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool = False,
    ) -> list[Record]:
        """Sandboxes that match, the newest first; with `ended`, those that have ended, at most 1,000 of them."""
        queries = (await self._open()).queries
        return await queries.list(state=state, owner=owner, name=name, labels=labels, ended=ended)

    async def describe(self, sandbox_id: str) -> Record:
        """What is known of it, after asking the engine; also of one that has ended. SandboxNotFoundError otherwise."""
        return await (await self._open()).queries.describe(sandbox_id)

    async def wait_until(self, sandbox_id: str, state: State, timeout: float = 60.0) -> Record:
        """Wait until it is in that state (MISSING: gone). SandboxTimeoutError if it is not in time."""
        return await (await self._open()).queries.wait_until(sandbox_id, state, timeout)

    async def search_ended(
        self,
        *,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: tuple[float, str] | None = None,
        limit: int = 100,
    ) -> list[Record]:
        """One page of sandboxes that have ended, the newest first. `after` is the creation time and the id of the last
        sandbox on the previous page."""
        journal = (await self._open()).core.journal
        return await journal.ended(Search(owner, name, labels or {}, after, limit))

    async def events(
        self,
        *,
        after: int = 0,
        sandbox_id: str | None = None,
        owner: str | None = None,
        limit: int = 1000,
        kind: str | None = None,
    ) -> list[Event]:
        """Events after that number, oldest first: those of one sandbox, of one owner's sandboxes, or of all; of one
        kind, or of any."""
        journal = (await self._open()).core.journal
        return await journal.events(after=after, sandbox_id=sandbox_id, owner=owner, limit=limit, kind=kind)

    async def latest_event(self) -> int:
        """The number of the last event."""
        return await (await self._open()).core.journal.latest()

    async def resources(self) -> dict[str, Stats]:
        """What each running sandbox uses."""
        return await (await self._open()).queries.resources()

    @property
    def max_sandboxes(self) -> int:
        """How many sandboxes there may be. A lower number than there are ends none of them."""
        return self._rules.max_sandboxes

    @max_sandboxes.setter
    def max_sandboxes(self, number: int) -> None:
        self._change_rules(max_sandboxes=number)

    @property
    def idle_timeout(self) -> float:
        """The default idle timeout of sandboxes, in seconds."""
        return self._rules.idle_timeout

    @idle_timeout.setter
    def idle_timeout(self, seconds: float) -> None:
        self._change_rules(idle_timeout=seconds)

    @property
    def cleanup_interval(self) -> float:
        """How often all sandboxes are looked at, in seconds."""
        return self._rules.cleanup_interval

    @cleanup_interval.setter
    def cleanup_interval(self, seconds: float) -> None:
        self._change_rules(cleanup_interval=seconds)

    def get_stats(self) -> dict[str, object]:
        """Figures about all of them."""
        counted = self._parts.queries.figures() if self._parts else {"total_sandboxes": 0, "active_operations": 0}
        return {
            **counted,
            "max_sandboxes": self._rules.max_sandboxes,
            "idle_timeout": self._rules.idle_timeout,
            "cleanup_interval": self._rules.cleanup_interval,
            "is_shutting_down": self._closing is not None,
        }

    def metrics(self) -> str:
        """The same for Prometheus, as text."""
        return self._parts.queries.exposition() if self._parts else ""

    # --- inside ---------------------------------------------------------------------------------------------------

    def _change_rules(self, **changes: float) -> None:
        """ValueError for what makes no sense. What they are now holds for sandboxes that are there already too."""
        self._rules = replace(self._rules, **changes)  # type: ignore[arg-type]
        if self._parts is not None:
            self._parts.core.rules = self._rules
            self._parts.reaper.rules_changed()

    async def _create(self, request: Request, *, or_get: bool) -> str:
        parts = await self._open()
        return await parts.creating.create(request, or_get=or_get)

    async def _called(self, text: str, owner: str | None) -> Member:
        members = (await self._open()).core.members
        found = members.find(text)
        if found is None or owner not in (None, found.record.owner):
            found = called(members, text, owner)
        if found is not None:
            return await self._member(found.id)
        if owner is not None:
            raise SandboxNotFoundError(f"Sandbox {text} not found")
        return await self._member(text)

    async def _member(self, sandbox_id: str) -> Member:
        parts = await self._open()
        try:
            return parts.core.members.get(sandbox_id)
        except SandboxNotFoundError as error:
            await parts.queries.explain(sandbox_id, error)
            raise
