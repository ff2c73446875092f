"""Opening a manager once, whoever comes first, and closing it once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from atoll.engines.base import Engine
from atoll.errors import ManagerClosedError
from atoll.manager.clock import Clock, SystemClock
from atoll.manager.core import Rules
from atoll.manager.engines import Engines
from atoll.manager.ledger import OnEvent
from atoll.manager.parts import Parts
from atoll.manager.pool import PoolSettings
from atoll.manager.record import OnIdle
from atoll.manager.recovery import Recovered
from atoll.manager.retention import Retention
from atoll.manager.shutdown import Shutdown, shut_down
from atoll.settings import Settings


class Opening:
    """The life of a manager. Belongs to one event loop; use it as an async context manager.

    The first use opens the state directory and recovers what an earlier manager left. All times are in seconds.
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
        self._engine = engine
        self._settings = settings or Settings.load()
        self._state_dir = state_dir or self._settings.data_dir / "manager"
        self._pools = list(pools)
        self._at_exit = at_exit
        self._power_safe = power_safe
        self._on_event = on_event
        self._retention = retention
        self._clock = clock or SystemClock()
        self._on_use: Callable[[str], None] | None = None
        self._parts: Parts | None = None
        self._starting: asyncio.Task[Parts] | None = None
        self._closing: asyncio.Task[Shutdown] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> Recovered:
        """Take the state directory and settle what an earlier manager left. May be repeated; any other use does it too.

        Raises StateInUseError, StateError, or what the engine says.
        """
        return (await self._open()).recovered

    def start_cleanup_task(self) -> None:
        """End idle sandboxes from now on. Done by `start` as well; may be repeated."""
        if self._parts is not None and self._closing is None and (self._reaping is None or self._reaping.done()):
            self._reaping = self._parts.core.tasks.spawn(self._parts.reaper.run(), "reaper")

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

    async def _open(self) -> Parts:
        if self._closing is not None:
            raise ManagerClosedError("the manager was shut down", hint="Make a new SandboxManager.")
        if self._parts is not None:
            self._parts.check_loop()
            return self._parts
        if self._starting is None:
            self._starting = asyncio.create_task(self._open_parts(), name="atoll-manager-start")
            self._starting.add_done_callback(self._opened)
        return await asyncio.shield(self._starting)

    async def _open_parts(self) -> Parts:
        engines = Engines(self._engine, self._settings)
        parts = Parts(
            self._rules,
            engines,
            self._settings,
            self._clock,
            self._state_dir,
            self._pools,
            self._power_safe,
            self._retention,
        )
        if self._on_use is not None:
            parts.core.used = self._on_use
        try:
            await parts.open(self._on_event)
        except BaseException:
            await engines.aclose()
            raise
        return parts

    def _opened(self, task: asyncio.Task[Parts]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is None:
            self._parts = task.result()
            self.start_cleanup_task()

    async def _close(self, keep: bool, timeout: float, drain: float) -> Shutdown:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._parts is None:
            return Shutdown()
        report = await shut_down(self._parts, keep=keep, timeout=timeout, drain=drain)
        await self._parts.core.engines.aclose()
        return report
