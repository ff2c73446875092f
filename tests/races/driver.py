"""A process that does random things to sandboxes, many at once, made to be killed. It logs what it asks and is told.

python -m races.driver ROLE ENGINE DATA RUN LOG SEED OPERATIONS
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.errors import SandboxError
from atoll.manager import PoolSettings, SandboxManager
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

CAP, CLIENTS, MOST_CHECKPOINTS = 8, 5, 4
DEADLINE_S = 120.0
"""No call may take longer, whatever else goes on."""
MANAGED = {
    "create": 14,
    "claim": 10,
    "delete": 20,
    "restart": 12,
    "rollback": 10,
    "checkpoint": 12,
    "fork": 6,
    "pause": 8,
    "resume": 8,
    "use": 8,
    "kill": 4,
}
WITH_MEMORY = {**MANAGED, "sleep": 6}
"""Where the memory of a sandbox can be saved."""
DIRECT = {"delete": 2, "restart": 6, "rollback": 4, "checkpoint": 5, "pause": 4, "resume": 5, "inspect": 6, "kill": 2}


def engine_for(name: str, settings: Settings) -> LinuxEngine:
    return NativeEngine(settings) if name == "native" else OciEngine(settings, name)


def spec_for(name: str, **more: object) -> SandboxSpec:
    return SandboxSpec.of(**({"isolation": "gvisor"} if name == "runsc" else {}), **more)


class Driver:
    """What both roles share: choosing, logging, and a deadline for every call."""

    def __init__(self, engine: str, settings: Settings, log: str, seed: str, operations: int) -> None:
        self.name, self.settings, self.left = engine, settings, operations
        self.engine = engine_for(engine, settings)
        self.dice = random.Random(seed)
        self._fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._number = 0

    def say(self, **what: object) -> None:
        os.write(self._fd, (json.dumps({"by": os.getpid(), **what}) + "\n").encode())

    async def run(self, weights: dict[str, int], act: Callable[[str, str | None], Awaitable[object]]) -> None:
        async def client() -> None:
            while self.left > 0:
                verb = self.dice.choices([*weights], [*weights.values()])[0]
                ids = sorted(await self.ids())
                target = self.dice.choice(ids) if ids and verb not in ("create", "claim") else None
                if target is None and verb not in ("create", "claim"):
                    await asyncio.sleep(0.01)
                    continue
                self.left -= 1
                await self._one(verb, target, act)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _one(self, verb: str, target: str | None, act: Callable[[str, str | None], Awaitable[object]]) -> None:
        self._number += 1
        number, began = self._number, time.monotonic()
        self.say(asked=number, verb=verb, id=target)
        told: dict[str, object] = {}
        try:
            async with asyncio.timeout(DEADLINE_S):
                told["result"] = await act(verb, target)
        except TimeoutError:
            told["hung"] = True
        except SandboxError as error:
            told |= {"error": type(error).__name__, "text": str(error)}
        except Exception as error:
            told |= {"error": type(error).__name__, "text": repr(error), "unexpected": True}
        self.say(answered=number, verb=verb, id=target, seconds=round(time.monotonic() - began, 3), **told)

    async def ids(self) -> list[str]:
        raise NotImplementedError

    def kill_one(self, sandbox_id: str) -> int:
        """Any process of the sandbox, as likely its first as another."""
        pids = sorted(self.engine.layout.group(sandbox_id).pids())
        if not pids:
            return 0
        pid = self.dice.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return pid

    async def go_back(self, sandbox: AsyncSandbox) -> str:
        checkpoints = await sandbox.checkpoints()
        if not checkpoints:
            return (await sandbox.checkpoint()).id
        chosen = self.dice.choice(checkpoints)
        await sandbox.rollback(chosen)
        return chosen.id

    async def change(self, verb: str, sandbox: AsyncSandbox) -> str | None:
        """What both roles do to a sandbox that they hold. Returns the id of the checkpoint, where there is one."""
        match verb:
            case "restart":
                await sandbox.restart()
            case "rollback":
                return await self.go_back(sandbox)
            case "checkpoint":
                return await self.save(sandbox)
        return None

    async def save(self, sandbox: AsyncSandbox) -> str:
        checkpoints = await sandbox.checkpoints()
        if len(checkpoints) >= MOST_CHECKPOINTS:
            await sandbox.delete_checkpoint(checkpoints[0])
        memory = self.name == "runsc" and self.dice.random() < 0.3
        return (await sandbox.checkpoint(memory=memory, drop_connections=memory)).id


class Managed(Driver):
    """A manager with clients of its own."""

    async def main(self) -> None:
        self.manager = SandboxManager(
            CAP,
            engine=self.engine,
            settings=self.settings,
            state_dir=self.settings.data_dir / "manager",
            pools=[PoolSettings(spec_for(self.name), size=1)],
            at_exit="keep",
        )
        recovered = await self.manager.start()
        self.say(up=True, failed=recovered.failed)
        await self.run(WITH_MEMORY if self.name == "runsc" else MANAGED, self._act)
        report = await self.manager.cleanup(timeout=DEADLINE_S)
        await self.engine.aclose()
        self.say(over=True, failed=[*report.failed])

    async def ids(self) -> list[str]:
        return [record.id for record in await self.manager.list_sandboxes()]

    async def _act(self, verb: str, id: str | None) -> object:
        manager = self.manager
        if verb in ("create", "claim"):
            own = {"env": {"OWN": "1"}} if verb == "create" else {}
            return await manager.create_sandbox(spec_for(self.name, **own))
        assert id is not None
        match verb:
            case "delete":
                return await manager.delete_sandbox(id)
            case "pause":
                await manager.pause_sandbox(id)
            case "sleep":
                await manager.pause_sandbox(id, memory="disk", drop_connections=True)
            case "resume":
                await manager.resume_sandbox(id)
            case "kill":
                return self.kill_one(id)
            case _:
                return await self._inside(verb, await manager.get_sandbox(id))
        return None

    async def _inside(self, verb: str, sandbox: ManagedSandbox) -> object:
        match verb:
            case "fork":
                return [fork.id for fork in await sandbox.fork(self.dice.choice((1, 1, 2)))]
            case "use":
                result = await sandbox.exec("sleep 1000 & setsid sleep 1000 & echo here >>file; echo ok", timeout=60)
                return result.stdout
        return await self.change(verb, sandbox)


class Direct(Driver):
    """Another process of the installation, which knows of no manager, as the command line does."""

    async def main(self) -> None:
        self.say(up=True, failed=[])
        await self.run(DIRECT, self._act)
        await self.engine.aclose()
        self.say(over=True, failed=[])

    async def ids(self) -> list[str]:
        return [handle.sandbox_id for handle in await self.engine.list()]

    async def _act(self, verb: str, id: str | None) -> object:
        assert id is not None
        if verb == "kill":
            return self.kill_one(id)
        sandbox = await AsyncSandbox.attach(id, engine=self.engine, settings=self.settings)
        try:
            match verb:
                case "delete":
                    await self.engine.delete(sandbox.access.handle())
                case "pause":
                    await sandbox.pause()
                case "resume":
                    await sandbox.resume()
                case "inspect":
                    return (await sandbox.inspect()).state
                case _:
                    return await self.change(verb, sandbox)
        finally:
            await sandbox.detach()
        return None


def main(role: str, engine: str, data: str, run: str, log: str, seed: str, operations: str) -> None:
    kind = Managed if role == "managed" else Direct
    asyncio.run(kind(engine, Settings(Path(data), Path(run)), log, seed, int(operations)).main())


if __name__ == "__main__":
    main(*sys.argv[1:])
