"""Every call on a sandbox that its agent has to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from atoll import AsyncSandbox

Call = Callable[[AsyncSandbox], Awaitable[Any]]


async def _walk(sandbox: AsyncSandbox) -> None:
    async for _ in sandbox.walk():
        pass


async def _read_stream(sandbox: AsyncSandbox) -> None:
    async for _ in sandbox.read_stream("kept"):
        pass


async def _watch(sandbox: AsyncSandbox) -> None:
    async with sandbox.watch():
        pass


CALLS: dict[str, Call] = {
    "exec": lambda sandbox: sandbox.exec("touch done-exec", timeout=2),
    "start": lambda sandbox: sandbox.start("touch done-start"),
    "run_command": lambda sandbox: sandbox.run_command("touch done-shell", timeout=2),
    "command": lambda sandbox: sandbox.command("nobody"),
    "commands": lambda sandbox: sandbox.commands(),
    "open_terminal": lambda sandbox: sandbox.open_terminal("touch done-terminal"),
    "read_file": lambda sandbox: sandbox.read_file("kept"),
    "read_stream": _read_stream,
    "write_file": lambda sandbox: sandbox.write_file("done-write", "x"),
    "write_stream": lambda sandbox: sandbox.write_stream("done-stream", [b"x"] * 3),
    "append_file": lambda sandbox: sandbox.append_file("done-append", "x"),
    "list_files": lambda sandbox: sandbox.list_files(),
    "walk": _walk,
    "stat": lambda sandbox: sandbox.stat("kept"),
    "exists": lambda sandbox: sandbox.exists("kept"),
    "make_dir": lambda sandbox: sandbox.make_dir("done-dir"),
    "move": lambda sandbox: sandbox.move("kept", "done-move"),
    "remove": lambda sandbox: sandbox.remove("kept"),
    "chmod": lambda sandbox: sandbox.chmod("kept", 0o600),
    "watch": _watch,
    "copy_to": lambda sandbox: sandbox.copy_to("/etc/hostname", "done-copy"),
    "copy_from": lambda sandbox: sandbox.copy_from("kept", "/tmp/never"),
    "connect_port": lambda sandbox: sandbox.connect_port(80),
    "connect_socket": lambda sandbox: sandbox.connect_socket("/run/x"),
}


async def expect(name: str, sandbox: AsyncSandbox, kind: type[Exception], limit_s: float) -> None:
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s + 10):
            await CALLS[name](sandbox)
    except kind:
        took = time.monotonic() - started
        assert took < limit_s, f"{name} took {took:.1f} s"
        return
    except Exception as error:
        raise AssertionError(f"{name} raised {error!r}") from error
    raise AssertionError(f"{name} succeeded")
