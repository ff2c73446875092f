"""What a check works with."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.engines import registry
from atoll.engines.contract import Engine
from atoll.model import Handle, SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

_OTHER = """
import asyncio, json, sys
from atoll.conformance.bench import Bench
{source}
asyncio.run(main(Bench.told(sys.argv[1]), *sys.argv[2:]))
"""


@dataclass
class Bench:
    """One engine under test, with settings that belong to the test alone."""

    engine: Engine
    settings: Settings
    image: str = "host"
    """The image that sandboxes are created from unless a check names another."""
    _programs: dict[str, bool] = field(default_factory=dict)

    @asynccontextmanager
    async def sandbox(self, **spec: Any) -> AsyncIterator[AsyncSandbox]:
        """Yield a sandbox of this engine, which is deleted at the end. `spec` is as for `SandboxSpec`."""
        async with self.unmade(**spec) as sandbox:
            yield sandbox

    def unmade(self, **spec: Any) -> AsyncSandbox:
        """Return a sandbox that has not been created yet. The caller cleans it up."""
        return AsyncSandbox(SandboxSpec.of(**{"image": self.image, **spec}), engine=self.engine, settings=self.settings)

    async def handle(self, sandbox_id: str) -> Handle | None:
        """Return the handle from the engine's list; None if it is not in the list."""
        return next((found for found in await self.engine.list() if found.sandbox_id == sandbox_id), None)

    async def has(self, program: str) -> bool:
        """Return whether the image has this program."""
        if program not in self._programs:
            async with self.sandbox() as sandbox:
                result = await sandbox.exec(["sh", "-c", 'command -v "$0"', program], timeout=10)
            self._programs[program] = result.exit_code == 0
        return self._programs[program]

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """Yield an empty directory of the host, which every user may read."""
        path = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
        path.chmod(0o755)
        try:
            yield path
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    @asynccontextmanager
    async def other_process(self, source: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start another Python process on the same engine and settings, which is killed at the end if it still runs.

        `source` defines `async def main(bench, *arguments)`. Its standard output can be read.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-c", _OTHER.format(source=source), self._tell(), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            # The output is read to its end because only then the pipes are closed.
            await process.communicate()

    async def answer_of_other_process(self, source: str, *arguments: str) -> str:
        """Return what another process printed. Raises AssertionError if it fails."""
        async with self.other_process(source, *arguments) as process:
            out, err = await process.communicate()
            if process.returncode != 0:
                raise AssertionError(f"another process failed: {err.decode(errors='replace')}")
            return out.decode()

    @classmethod
    def told(cls, text: str) -> Bench:
        """Return the bench of the process that started this one."""
        told = json.loads(text)
        settings = Settings(Path(told["data_dir"]), Path(told["run_dir"]))
        return cls(registry.get(told["engine"], settings), settings, told["image"])

    def _tell(self) -> str:
        return json.dumps(
            {
                "engine": self.engine.name,
                "image": self.image,
                "data_dir": os.fspath(self.settings.data_dir),
                "run_dir": os.fspath(self.settings.run_dir),
            }
        )


def new_mark() -> str:
    """Return a unique number: a `sleep` of that many seconds can be told from every other process."""
    return str(10_000_000 + secrets.randbelow(80_000_000))
