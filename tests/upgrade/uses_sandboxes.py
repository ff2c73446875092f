"""Uses the sandboxes that `before/sandboxes.py` has made, with the code of this tree.

python -m upgrade.uses_sandboxes WANTED FACTS, for a user other than the one who runs the tests
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atoll import AsyncCommand, AsyncSandbox, Cause, Limits, State

_MORE_LINES = 10


class Uses:
    """A method for each kind of sandbox, with the name that the kind has in `before/sandboxes.py`."""

    def __init__(self, wanted: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._wanted = wanted
        self._engine: str = wanted["engine"]
        self._ids: dict[str, str] = facts["ids"]
        self._commands: dict[str, str] = facts["commands"]
        self._checkpoints: dict[str, str] = facts["checkpoints"]

    async def use_all(self) -> None:
        turns = asyncio.Semaphore(self._wanted["at_once"])

        async def in_turn(kind: str) -> None:
            async with turns:
                await getattr(self, kind)()

        await asyncio.gather(*(in_turn(kind) for kind in self._wanted["kinds"]))

    @asynccontextmanager
    async def attached(self, name: str) -> AsyncIterator[AsyncSandbox]:
        sandbox = await AsyncSandbox.attach(self._ids[name], engine=self._engine, timeout=30)
        try:
            yield sandbox
        finally:
            await sandbox.detach()

    async def busy(self) -> None:
        async with self.attached("busy") as sandbox:
            assert (await sandbox.inspect()).state is State.RUNNING
            assert sandbox.spec.labels == {"team": "red"}
            assert (await sandbox.exec("echo $COLOUR; pwd")).stdout == "coral\n/workspace\n"
            assert await sandbox.read_file("notes.txt") == "kept"
            assert await sandbox.read_bytes("/tmp/data") == bytes(range(256))
            assert (await sandbox.stat("/tmp/data")).mode & 0o777 == 0o640
            assert ((await sandbox.stats()).pids or 2) > 1
            await self._goes_on("endless", sandbox)
            ended = await (await self._command("ended", sandbox)).wait()
            assert (ended.stdout, ended.stderr, ended.exit_code) == ("out\n", "err\n", 7)
            typed = await self._command("typed", sandbox)
            await typed.send_stdin("after\n")
            await typed.close_stdin()
            assert (await typed.wait()).stdout == "before\nafter\n"
            assert await sandbox.run_command("f() { echo new shell; }; f") == "new shell"
            command = await self._command("endless", sandbox)
            await command.kill()
            assert (await command.wait()).cause in (Cause.SIGNAL, Cause.KILLED)

    async def paused(self) -> None:
        async with self.attached("paused") as sandbox:
            assert (await sandbox.inspect()).state is State.PAUSED
            await sandbox.resume()
            assert (await sandbox.inspect()).state is State.RUNNING
            assert await sandbox.read_file("notes.txt") == "before the pause"
            await self._goes_on("paused", sandbox)
            await sandbox.pause()
            assert (await sandbox.inspect()).state is State.PAUSED
            await sandbox.resume()

    async def limited(self) -> None:
        async with self.attached("limited") as sandbox:
            asked = Limits(**self._wanted["limits"])
            held = (await sandbox.info()).limits
            for name in asked.model_fields_set:
                assert getattr(held, name) == getattr(asked, name), name
            if asked.open_files is not None:
                assert (await sandbox.exec("ulimit -n")).stdout == f"{asked.open_files}\n"
            if asked.memory_bytes is not None:
                done = await sandbox.exec(f"head -c {2 * asked.memory_bytes} /dev/zero | tail > /dev/null")
                assert done.cause is Cause.OUT_OF_MEMORY, done
            if asked.disk_bytes is not None:
                done = await sandbox.exec(f"head -c {2 * asked.disk_bytes} /dev/zero > large")
                assert not done.success
                await sandbox.remove("large")

    async def volumes(self) -> None:
        shared, fixed = map(Path, self._wanted["volumes"])
        assert (shared / "from-before").read_text() == "written"
        async with self.attached("volumes") as sandbox:
            assert await sandbox.read_file("/fixed/file") == "fixed"
            assert not (await sandbox.exec("touch /fixed/more")).success
            (shared / "from-outside").write_text("read")
            assert await sandbox.read_file("/shared/from-outside") == "read"
            await sandbox.exec("echo x > /shared/program; chmod 4755 /shared/program")
            assert (shared / "program").stat().st_mode & 0o7000 == 0, "a set-uid program came out of a sandbox"
            assert not (fixed / "more").exists()

    async def saved(self) -> None:
        async with self.attached("saved") as sandbox:
            found = await sandbox.checkpoints()
            first, second = (self._checkpoints[name] for name in ("1", "2"))
            assert [(each.id, each.name) for each in found] == [(first, "checkpoint-1"), (second, "checkpoint-2")]
            changes = {str(change) for change in await sandbox.diff(first)}
            assert changes == {"C /workspace/number", "A /workspace/later"}
            await sandbox.rollback("checkpoint-1")
            assert await sandbox.read_file("number") == "1"
            assert (await sandbox.checkpoint("checkpoint-3")).parent == first
            await sandbox.rollback(second)
            assert await sandbox.read_file("number") == "2"
            (twin,) = await sandbox.fork(checkpoint=first)
            async with twin:
                assert await twin.read_file("number") == "1"
            await sandbox.delete_checkpoint(first)
        async with AsyncSandbox(image=f"snapshot:{self._wanted['snapshot']}", engine=self._engine) as copy:
            assert await copy.read_file("number") == "1"
        async with self.attached("fork") as fork:
            assert await fork.read_file("number") == "of the fork"
            async with await AsyncSandbox.attach(self._ids["saved"], engine=self._engine):
                pass  # what the fork came from is deleted
            await fork.restart()
            assert await fork.read_file("number") == "3", "what it began with"

    async def went_back(self) -> None:
        async with self.attached("went-back") as sandbox:
            assert await sandbox.read_file("number") == "1"
            assert (await sandbox.checkpoint("next")).parent == self._checkpoints["back"]

    async def undone(self) -> None:
        async with self.attached("undone") as sandbox:
            assert await sandbox.read_file("number") == "two\n"
            await sandbox.undo()
            assert await sandbox.read_file("number") == "one\n"

    async def memory(self) -> None:
        async with self.attached("memory") as sandbox:
            before = int(await sandbox.read_file("count"))
            await sandbox.rollback(self._checkpoints["memory"])
            await sandbox.exec(f"until test $(cat count) -gt {before}; do sleep 0.02; done")
        async with self.attached("asleep") as sandbox:
            assert (await sandbox.inspect()).state is State.PAUSED
            await sandbox.resume()
            assert await sandbox.read_file("notes.txt") == "before the sleep"
            await self._goes_on("asleep", sandbox)

    async def died(self) -> None:
        for name in ("died", "died-unseen"):
            async with self.attached(name) as sandbox:
                while (seen := await sandbox.inspect()).state is State.RUNNING:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                assert seen.cause is Cause.TIMEOUT, seen

    async def killed(self) -> None:
        async with self.attached("killed") as sandbox:
            seen = await sandbox.inspect()
            assert seen.state in (State.STOPPED, State.ERROR), seen

    async def _command(self, name: str, sandbox: AsyncSandbox) -> AsyncCommand:
        command = await sandbox.command(self._commands[name])
        assert command.dropped_bytes == 0
        return command

    async def _goes_on(self, name: str, sandbox: AsyncSandbox) -> None:
        """All that it has written is there, from its first line on, and there comes more."""
        command, text, until = await self._command(name, sandbox), "", 0
        async for piece in command:
            text += piece.text
            until = until or text.count("\n") + _MORE_LINES
            if text.count("\n") >= until:
                break
        lines = text.splitlines()[:until]
        assert lines == [f"line {number}" for number in range(len(lines))]


if __name__ == "__main__":
    os.umask(0o022)
    asyncio.run(Uses(json.loads(sys.argv[1]), json.loads(sys.argv[2])).use_all())
