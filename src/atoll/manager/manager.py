"""Many sandboxes in one process: made side by side, ended when idle, and still there after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

from atoll.engines.contract import Engine
from atoll.errors import ManagerClosedError, SandboxError
from atoll.guest.guest import Guest
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.pool import PoolSettings
from atoll.manager.queries import Queries
from atoll.manager.record import OnIdle, Record
from atoll.manager.recovery import Recovered
from atoll.manager.request import Config, Request, SandboxOptions, SharedOptions
from atoll.manager.rules import Retention, Rules
from atoll.manager.transitions import OnEvent
from atoll.manager.wiring import Shutdown, Wiring
from atoll.model import Cause
from atoll.sandbox.export import Export
from atoll.sandbox.sandbox import lease_seconds
from atoll.settings import Settings
from atoll.timer import Clock, SystemClock

T = TypeVar("T")
_CHANGEABLE = frozenset(("labels", "services", "env"))


class SandboxManager(Queries):
    """The sandboxes of one state directory.

    Belongs to one event loop; use it as an async context manager. The first use opens the state directory and recovers
    what an earlier manager left. All times are in seconds.
    """

    def __init__(
        self,
        max_sandboxes: int = 100,
        idle_timeout: float = 3600,
        cleanup_interval: float = 300,
        *,
        engine: str | Engine = "auto",
        settings: Settings | None = None,
        state_dir: Path | None = None,
        at_cap: Literal["refuse", "pause", "pause-any"] = "refuse",
        on_idle: OnIdle = "end",
        disk_timeout: float | None = None,
        paused_timeout: float = 7 * 86400.0,
        max_per_owner: int | None = None,
        max_paused: int | None = None,
        max_lifetime: float | None = None,
        pools: Iterable[PoolSettings] = (),
        at_exit: Literal["delete", "keep"] = "delete",
        power_safe: bool = False,
        on_event: OnEvent | None = None,
        retention: Retention | None = None,
        clock: Clock | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._rules = rules or Rules(
            max_sandboxes,
            idle_timeout,
            cleanup_interval,
            at_cap,
            max_per_owner,
            max_paused,
            max_lifetime,
            on_idle=on_idle,
            disk_timeout=disk_timeout,
            paused_timeout=paused_timeout,
        )
        settings = settings or Settings.load()
        self._open_wiring = functools.partial(
            Wiring.open,
            engine=engine,
            settings=settings,
            clock=clock or SystemClock(),
            state_dir=state_dir or settings.data_dir / "manager",
            pools=list(pools),
            power_safe=power_safe,
            retention=retention,
            on_event=on_event,
        )
        self._at_exit = at_exit
        self._on_use: Callable[[str], None] = lambda sandbox_id: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[Wiring] | None = None
        self._closing: asyncio.Task[Shutdown] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Recovered:
        """Take the state directory and settle what an earlier manager left. May be repeated; any other use does it too.

        Raises StateInUseError, StateError, or what the engine says.
        """
        return (await self._open()).recovered

    def start_cleanup_task(self) -> None:
        """End idle sandboxes from now on. Done by `start` as well; may be repeated."""
        if self._wiring is not None and self._closing is None and (self._reaping is None or self._reaping.done()):
            self._reaping = self._wiring.context.tasks.spawn(self._wiring.reaper.run(), "reaper")

    async def cleanup(self, *, keep: bool | None = None, timeout: float = 30.0, drain: float = 0.0) -> Shutdown:
        """Shut down: delete every sandbox, or keep them for the next start. Says what it could not do in time.

        New work is refused at once. What is under way has `drain` seconds to end. May be repeated; cancelling the
        caller does not stop it.
        """
        if self._closing is None:
            keep = self._at_exit == "keep" if keep is None else keep
            self._closing = asyncio.create_task(self._close(keep, timeout, drain), name="atoll-shutdown")
            self._stop.set()
        return await asyncio.shield(self._closing)

    def stop_on_signals(self, *signals: signal.Signals, drain: float = 10.0) -> None:
        """Shut down, after draining, on SIGTERM or the given signals. `closed` returns when that is over."""
        loop = asyncio.get_running_loop()
        stopping: set[asyncio.Task[Shutdown]] = set()

        def stop() -> None:
            task = loop.create_task(self.cleanup(drain=drain))
            stopping.add(task)
            task.add_done_callback(stopping.discard)

        for number in signals or (signal.SIGTERM,):
            loop.add_signal_handler(number, stop)

    async def closed(self) -> Shutdown:
        """Wait until the manager has shut down, for whatever reason."""
        await self._stop.wait()
        return await self.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    async def _open(self) -> Wiring:
        if self._closing is not None:
            raise ManagerClosedError("the manager was shut down", hint="Make a new SandboxManager.")
        if self._wiring is not None:
            if self._loop is not asyncio.get_running_loop():
                raise SandboxError("this manager belongs to another event loop", hint="Make one for each event loop.")
            return self._wiring
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            opening = self._open_wiring(rules=self._rules, on_use=self._on_use)
            self._starting = asyncio.create_task(opening, name="atoll-manager-start")
            self._starting.add_done_callback(self._opened)
        return await asyncio.shield(self._starting)

    def _opened(self, task: asyncio.Task[Wiring]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is None:
            self._wiring = task.result()
            self.start_cleanup_task()

    async def _close(self, keep: bool, timeout: float, drain: float) -> Shutdown:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._wiring is None:
            return Shutdown()
        return await self._wiring.shut_down(keep=keep, timeout=timeout, drain=drain)

    # --- sandboxes ------------------------------------------------------------------------------------------------

    async def create_sandbox(
        self,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        **options: Unpack[SandboxOptions],
    ) -> str:
        """Make a sandbox, or claim one from a pool; returns its id when it answers.

        `config` may be an object with the names of a spec, or as the Manus example has it; `SandboxOptions` says what
        else can be asked for. LimitReachedError when there is no room, ConflictError when the owner has a sandbox of
        that name. Cancelling leaves nothing behind.
        """
        request = Request.of(config, volume_bindings, **options)
        return await (await self._open()).creator.create(request)

    async def get_or_create(
        self,
        name: str,
        config: Config = None,
        volume_bindings: Mapping[str, str] | None = None,
        **options: Unpack[SharedOptions],
    ) -> str:
        """The id of the owner's sandbox of that name, whatever it was made from; if there is none it is made."""
        request = Request.of(config, volume_bindings, name=name, **options)
        return await (await self._open()).creator.create(request, or_get=True)

    async def get_sandbox(self, sandbox_id: str, *, owner: str | None = None) -> ManagedSandbox:
        """The sandbox of that id, or the owner's of that name, or of the task of that id. SandboxNotFoundError (a
        KeyError) if there is none, saying why it ended if it has. With an owner, what is another's is not there;
        without one, names are those of sandboxes that nobody owns.

        Getting it is no use of it: whoever holds it long may find that it was ended. Using one that fell asleep wakes
        it; using one that was paused by `pause_sandbox` raises SandboxPausedError.
        """
        return (await self._called(sandbox_id, owner)).sandbox

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
        wiring = await self._open()
        members = wiring.context.members
        member = members.find(sandbox_id) or members.called(owner, sandbox_id)
        if member is None or member.waits_in_pool or owner not in (None, member.record.owner):
            return False
        if export is not None and not member.is_being_deleted:
            await Export.of(export).run(member.sandbox)
        if grace > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await member.usage.quiet()
        await wiring.deleter.delete(member, Cause.USER, "it was deleted")
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
        requests = Request.for_forks(
            member.record, count, checkpoint, memory, names=names, labels=labels, lifetime=lifetime, key=key
        )
        forker = (await self._open()).forker
        made = await forker.fork(member, requests, checkpoint, memory=memory, drop_connections=drop_connections)
        return [each.id for each in made]

    async def pause_sandbox(
        self, sandbox_id: str, *, memory: Literal["ram", "disk"] = "ram", drop_connections: bool = False
    ) -> None:
        """Stop its processes where they are. UnsupportedError where the engine cannot. May be repeated.

        With memory="disk" they take no memory meanwhile; connections to the outside are then in the way, or dropped.
        """
        member = await self._member(sandbox_id)
        pauser = (await self._open()).pauser
        await pauser.pause(member, disk=memory == "disk", drop_connections=drop_connections)

    async def resume_sandbox(self, sandbox_id: str) -> None:
        """Let its processes go on. LimitReachedError when there is no room for it."""
        member = await self._member(sandbox_id)
        await (await self._open()).pauser.resume(member)

    async def extend_lifetime(self, sandbox_id: str, seconds: float) -> Record:
        """It may live so long from now on, but never longer than `max_lifetime` from now."""
        if not seconds > 0:
            raise ValueError(f"a lifetime must be more than 0 seconds, not {seconds!r}")
        member, wiring = await self._member(sandbox_id), await self._open()
        times = wiring.context.expiry(wiring.context.shortened(seconds))
        await wiring.context.transitions.change(member, act=member.record.act, update=times)
        wiring.schedule.hurry()
        return member.record

    async def keep_alive(self, sandbox_id: str, seconds: float) -> Record:
        """Count the sandbox as in use for this many seconds from now, at most a day. Its lifetime still ends it."""
        lease_seconds(seconds)
        member = await self._member(sandbox_id)
        await member.sandbox.keep_alive(seconds)
        return member.record

    async def watch_command(self, sandbox_id: str, command_id: str) -> None:
        """Report the end of this command of the sandbox, as an event and as `command_end` of its record."""
        member = await self._member(sandbox_id)
        await (await self._open()).commands.begin(member, command_id)

    def on_use(self, listener: Callable[[str], None]) -> None:
        """Call it with the id of a sandbox whenever a use of it begins. It must be quick. Before the first use only."""
        self._on_use = listener

    async def observe(self, sandbox_id: str, question: Callable[[Guest], Awaitable[T]], timeout: float) -> T:
        """What the sandbox's agent answers. Not a use of the sandbox; SandboxGoneError if it does not run."""
        member = await self._member(sandbox_id)
        return await (await self._open()).health.ask(member, question, timeout)

    async def update(self, sandbox_id: str, change: Callable[[Record], Mapping[str, object]]) -> Record:
        """Change `labels`, `services` or `env` of its record. `change` gets the record and returns what is new; nothing
        comes in between. Variables hold for commands that are started afterwards."""
        member, context = await self._member(sandbox_id), await self._context()
        update = change(member.record)
        assert update.keys() <= _CHANGEABLE
        if any(getattr(member.record, name) != value for name, value in update.items()):
            written = context.transitions.correct(member, update)
            member.sandbox.configure(member.record.env, member.record.timeout_s)
            await written
        return member.record

    async def report(self, sandbox_id: str, kind: str, messages: Sequence[tuple[str, str]]) -> None:
        """Add events of this kind that change nothing: each has a reason, and data as JSON."""
        member = await self._member(sandbox_id)
        await (await self._context()).transitions.report(member, kind, messages)

    async def cleanup_idle(self) -> None:
        """Do now what the cleanup task does from time to time, and wait until it is done."""
        await asyncio.gather(*await (await self._open()).reaper.sweep(), return_exceptions=True)

    # --- its rules ------------------------------------------------------------------------------------------------

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
        return {
            **self._figures(),
            "max_sandboxes": self._rules.max_sandboxes,
            "idle_timeout": self._rules.idle_timeout,
            "cleanup_interval": self._rules.cleanup_interval,
            "is_shutting_down": self._closing is not None,
        }

    def _change_rules(self, **changes: float) -> None:
        """Raises ValueError. What the rules are now holds for sandboxes that are there already too."""
        self._rules = replace(self._rules, **changes)  # type: ignore[arg-type]
        if self._wiring is not None:
            self._wiring.context.rules = self._rules
            self._wiring.schedule.rules_changed()
