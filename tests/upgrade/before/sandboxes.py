"""Makes sandboxes of one engine, in every state that one can be in, prints their ids and is killed.

This runs with the code of an earlier commit (see `version_before.py`): no name in here follows a renaming.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import atoll
from atoll import AsyncSandbox, SandboxError, SandboxSpec, State

COUNT = "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.05; done"


class Maker:
    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted
        self.ids: dict[str, str] = {}
        self.commands: dict[str, str] = {}
        self.checkpoints: dict[str, str] = {}

    async def make(self, name: str, **more: Any) -> AsyncSandbox:
        base = dict(self.wanted["spec"])
        volumes = [*base.pop("volumes", ()), *more.pop("volumes", ())]
        sandbox = AsyncSandbox(engine=self.wanted["engine"], volumes=volumes or None, timeout=30, **{**base, **more})
        self.ids[name] = (await sandbox.create()).id
        return sandbox

    async def start(self, name: str, sandbox: AsyncSandbox, line: str, **more: Any) -> Any:
        command = await sandbox.start(line, **more)
        self.commands[name] = command.id
        return command

    async def busy(self) -> None:
        sandbox = await self.make("busy", env={"COLOUR": "coral"}, labels={"team": "red"})
        await sandbox.write_file("notes.txt", "kept")
        await sandbox.write_file("/tmp/data", bytes(range(256)), mode=0o640)
        await sandbox.run_command("cd /tmp && mark=here")
        await self.start("endless", sandbox, COUNT)
        typing = await self.start("typed", sandbox, "cat", stdin=True)
        await typing.send_stdin("before\n")
        ended = await self.start("ended", sandbox, "echo out; echo err >&2; exit 7")
        await sandbox.exec(f"while kill -0 {ended.pid} 2>/dev/null; do sleep 0.01; done")

    async def paused(self) -> None:
        sandbox = await self.make("paused")
        await self.start("paused", sandbox, COUNT)
        await sandbox.write_file("notes.txt", "before the pause")
        await sandbox.pause()

    async def limited(self) -> None:
        spec = SandboxSpec.of(**{**self.wanted["spec"], "limits": self.wanted["limits"]})
        sandbox = AsyncSandbox(spec, engine=self.wanted["engine"])
        self.ids["limited"] = (await sandbox.create()).id

    async def volumes(self) -> None:
        shared, fixed = self.wanted["volumes"]
        sandbox = await self.make("volumes", volumes=[f"{shared}:/shared", f"{fixed}:/fixed:ro"])
        await sandbox.write_file("/shared/from-before", "written")

    async def saved(self) -> None:
        sandbox = await self.make("saved")
        for number in (1, 2):
            await sandbox.write_file("number", f"{number}")
            self.checkpoints[f"{number}"] = (await sandbox.checkpoint(f"checkpoint-{number}")).id
        await sandbox.write_file("number", "3")
        await sandbox.write_file("later", "3")
        await sandbox.snapshot(self.wanted["snapshot"], "checkpoint-1")
        (fork,) = await sandbox.fork()
        self.ids["fork"] = fork.id
        await fork.write_file("number", "of the fork")

    async def went_back(self) -> None:
        sandbox = await self.make("went-back")
        await sandbox.write_file("number", "1")
        self.checkpoints["back"] = (await sandbox.checkpoint("back")).id
        await sandbox.write_file("number", "2")
        await sandbox.rollback("back")

    async def undone(self) -> None:
        sandbox = await self.make("undone", undo=True)
        await sandbox.exec("echo one > number")
        await sandbox.exec("echo two > number")

    async def online(self) -> None:
        rules = {"allowed_domains": ["allowed.test"], "inject": self.wanted["inject"]}
        sandbox = await self.make("online", network=rules)
        await sandbox.exec(["python3", "-c", self.wanted["look"]])
        # The policy that holds is not the one that it was made with.
        changed = await self.make("changed", network="none")
        await changed.set_network({"allowed_domains": ["evil.test"]})

    async def memory(self) -> None:
        sandbox = await self.make("memory")
        await self.start("memory", sandbox, "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.02; done")
        await sandbox.exec("until test -s count; do sleep 0.02; done")
        self.checkpoints["memory"] = (await sandbox.checkpoint("memory", memory=True)).id
        asleep = await self.make("asleep")
        await self.start("asleep", asleep, COUNT)
        await asleep.write_file("notes.txt", "before the sleep")
        await asleep.pause(memory="disk")

    async def killed(self) -> None:
        before = descendants(os.getpid())
        await self.make("killed")
        for pid in descendants(os.getpid()) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def died(self) -> None:
        seen = await self.short_lived("died")
        while (await seen.inspect()).state is State.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await self.short_lived("died-unseen")

    async def short_lived(self, name: str) -> AsyncSandbox:
        """One that is made just before its time is over."""
        lifetime = 0.3
        while True:
            try:
                return await self.make(name, lifetime=lifetime)
            except SandboxError:
                if lifetime > 10:
                    raise
            lifetime *= 2


def descendants(pid: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, parent = path.parent.name, path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), set()).add(int(child))
    found, new = set[int](), {pid}
    while new:
        new = set[int]().union(*(children.get(each, ()) for each in new))
        found |= new
    return found


async def main(wanted: dict[str, Any]) -> None:
    maker = Maker(wanted)
    if "killed" in wanted["kinds"]:  # while there is no other
        await maker.killed()
    turns = asyncio.Semaphore(wanted["at_once"])

    async def in_turn(kind: str) -> None:
        async with turns:
            await getattr(maker, kind)()

    await asyncio.gather(*(in_turn(kind) for kind in wanted["kinds"] if kind != "killed"))
    facts = {"ids": maker.ids, "commands": maker.commands, "checkpoints": maker.checkpoints, "code": atoll.__file__}
    print(json.dumps(facts), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(json.loads(sys.argv[1])))
