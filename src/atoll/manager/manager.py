"""Manage many sandboxes in one process: create them concurrently, end them when idle, recover them after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

from atoll import tracing
from atoll.engines.contract import Engine
from atoll.errors import ManagerClosedError, SandboxError
from atoll.guest.guest import Guest
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.pool import PoolSettings
from atoll.manager.queries import Queries
from atoll.manager.record import OnIdle, Record
from atoll.manager.recovery import Recovered
from atoll.manager.request import Config, Request, SandboxOptions, SharedOptions
from atoll.manager.rules import AdjustableRules, Retention, Rules
from atoll.manager.transitions import OnEvent
from atoll.manager.wiring import Shutdown, Wiring
from atoll.model import Cause
from atoll.sandbox.export import Export
from atoll.sandbox.sandbox import lease_seconds
from atoll.settings import Settings
from atoll.timer import Clock, SystemClock

T = TypeVar("T")
_CHANGEABLE = frozenset(("labels", "services", "env"))


class SandboxManager(AdjustableRules, Queries):
    """Creates, finds, pauses and ends the sandboxes of one state directory.

    A manager belongs to one event loop; use it as an async context manager. The first use opens the state directory and
    recovers what an earlier manager left. All times are in seconds.

    `engine` is the engine of sandboxes that name none; `auto` is the first of `native`, `oci` and `bubblewrap` that
    works on this machine, and `oci` for the isolation levels `gvisor` and `vm`.
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
        """Open the state directory and recover what an earlier manager left. May be repeated; any other use does the
        same.

        Raises StateInUseError, StateError, or the engine's error.
        """
        return (await self._open()).recovered

    def start_cleanup_task(self) -> None:
        """Start to end idle sandboxes. `start` does this too. May be repeated."""
        if self._wiring is not None and self._closing is None and (self._reaping is None or self._reaping.done()):
            with tracing.apart():
                self._reaping = self._wiring.context.tasks.spawn(self._wiring.reaper.run(), "reaper")

    async def cleanup(self, *, keep: bool | None = None, timeout: float = 30.0, drain: float = 0.0) -> Shutdown:
        """Shut down: delete every sandbox, or keep all for the next start. Returns what was done and what was not done
        in time.

        New work is refused at once. Operations in progress have `drain` seconds to end. May be repeated; cancelling the
        caller does not stop the shutdown.
        """
        if self._closing is None:
            keep = self._at_exit == "keep" if keep is None else keep
            self._closing = asyncio.create_task(self._close(keep, timeout, drain), name="atoll-shutdown")
            self._stop.set()
        return await asyncio.shield(self._closing)

    def stop_on_signals(self, *signals: signal.Signals, drain: float = 10.0) -> None:
        """Shut down, after draining, on SIGTERM or on the given signals. `closed` returns when the shutdown is
        complete."""
        loop = asyncio.get_running_loop()
        stopping: set[asyncio.Task[Shutdown]] = set()

        def stop() -> None:
            task = loop.create_task(self.cleanup(drain=drain))
            stopping.add(task)
            task.add_done_callback(stopping.discard)

        for number in signals or (signal.SIGTERM,):
            loop.add_signal_handler(number, stop)

    async def closed(self) -> Shutdown:
        """Wait until the manager has shut down, whatever caused the shutdown."""
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
        """Create a sandbox, or claim one from a warm pool. Returns its id once its agent has answered.

        `config` may be a spec, a mapping with the fields of a spec, or a mapping as in the Manus example.
        `SandboxOptions` lists the other options. Raises LimitReachedError when there is no room, and ConflictError when
        the owner already has a sandbox of that name. Cancelling leaves nothing behind.
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
        """Return the id of the owner's sandbox of this name, whatever it was made from, or create it if there is
        none."""
        request = Request.of(config, volume_bindings, name=name, **options)
        return await (await self._open()).creator.create(request, or_get=True)

    async def get_sandbox(self, sandbox_id: str, *, owner: str | None = None) -> ManagedSandbox:
        """Return the sandbox of this id, or the owner's sandbox of this name, or the owner's sandbox of this task.

        Raises SandboxNotFoundError (a KeyError) if there is none; the error says why the sandbox ended if it has. With
        an owner, sandboxes of other owners are not found. Without one, names are those of sandboxes that have no owner.

        Getting a sandbox is not a use of it, so it may end while the caller holds it. Using a sandbox that the manager
        paused resumes it; using one that `pause_sandbox` paused raises SandboxPausedError.
        """
        return (await self._called(sandbox_id, owner)).sandbox

    @contextlib.asynccontextmanager
    async def sandbox_operation(self, sandbox_id: str, *, exclusive: bool = False) -> AsyncIterator[ManagedSandbox]:
        """Yield the sandbox, which is in use until the block ends. Blocks may overlap, but `exclusive` ones run one
        after another."""
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
        """Delete the sandbox and everything in it. Returns False if there is none, which is no error. Cancelling does
        not stop it.

        `sandbox_id` and `owner` are as for `get_sandbox`. With `grace`, operations in progress have this many seconds
        to end by themselves. With `export`, the contents of `/output` are first copied to that directory; if that
        fails, the sandbox stays.
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
        """Fork a sandbox, from its current state or from a checkpoint, and return the ids of the forks: of all, or of
        none.

        The forks belong to the same owner. `names` and `labels`, if given, have one entry for each fork; the other
        options are as for `create_sandbox`.
        """
        if count < 1 or any(len(each) not in (0, count) for each in (names, labels)):
            raise ValueError("count must be at least 1, and names and labels empty or one entry for each fork")
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
        """Stop the sandbox's processes where they are. Raises UnsupportedError where the engine cannot pause. May be
        repeated.

        With memory="disk" the paused sandbox uses no memory. Open connections to the outside then raise
        UnsupportedError, unless `drop_connections` allows dropping them.
        """
        member = await self._member(sandbox_id)
        pauser = (await self._open()).pauser
        await pauser.pause(member, disk=memory == "disk", drop_connections=drop_connections)

    async def resume_sandbox(self, sandbox_id: str) -> None:
        """Let the sandbox's processes go on. Raises LimitReachedError when there is no room for it."""
        member = await self._member(sandbox_id)
        await (await self._open()).pauser.resume(member)

    async def extend_lifetime(self, sandbox_id: str, seconds: float) -> Record:
        """Let the sandbox live for this many seconds from now, but never longer than `max_lifetime` from now."""
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
        """Report the end of this command as an event and as `command_end` of the sandbox's record."""
        member = await self._member(sandbox_id)
        await (await self._open()).commands.begin(member, command_id)

    def on_use(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the id of a sandbox whenever a use of it begins. It must return quickly, and can be set
        only before the manager's first use."""
        self._on_use = listener

    async def observe(self, sandbox_id: str, question: Callable[[Guest], Awaitable[T]], timeout: float) -> T:
        """Ask the sandbox's agent a question. This is not a use of the sandbox. Raises SandboxGoneError if it does not
        run."""
        member = await self._member(sandbox_id)
        return await (await self._open()).health.ask(member, question, timeout)

    async def update(self, sandbox_id: str, change: Callable[[Record], Mapping[str, object]]) -> Record:
        """Change `labels`, `services` or `env` in the sandbox's record.

        `change` receives the record and returns the new values; no other change happens in between. New variables apply
        to commands that are started afterwards.
        """
        member, context = await self._member(sandbox_id), await self._context()
        update = change(member.record)
        assert update.keys() <= _CHANGEABLE
        if any(getattr(member.record, name) != value for name, value in update.items()):
            written = context.transitions.correct(member, update)
            member.sandbox.configure(member.record.env, member.record.timeout_s)
            await written
        return member.record

    async def report(self, sandbox_id: str, kind: str, messages: Sequence[tuple[str, str]]) -> None:
        """Add events of this kind, which change nothing. Each message is a reason and its data as JSON."""
        member = await self._member(sandbox_id)
        await (await self._context()).transitions.report(member, kind, messages)

    async def cleanup_idle(self) -> None:
        """Do at once what the cleanup task does periodically, and wait until it is done."""
        await asyncio.gather(*await (await self._open()).reaper.sweep(), return_exceptions=True)

    def get_stats(self) -> dict[str, object]:
        """Return figures about the manager and its sandboxes."""
        return {
            **self._figures(),
            "max_sandboxes": self._rules.max_sandboxes,
            "idle_timeout": self._rules.idle_timeout,
            "cleanup_interval": self._rules.cleanup_interval,
            "is_shutting_down": self._closing is not None,
        }

    def _rules_changed(self) -> None:
        if self._wiring is not None:
            self._wiring.context.rules = self._rules
            self._wiring.schedule.rules_changed()
