"""The processes of a sandbox, as a shell inside sees them."""

from __future__ import annotations

from atoll.conformance.check import until
from atoll.sandbox.sandbox import AsyncSandbox

# One process reads all files and prints a line between them; `cat` would not show where a file ends.
_COMMAND_LINES = "tail -n +1 /proc/[0-9]*/cmdline 2>/dev/null"
_STATES = "cat /proc/[0-9]*/stat 2>/dev/null"

WAIT_FOR_GO = "while [ ! -e go ]; do sleep 0.02; done"
"""A command line that waits until there is a file `go` in the work directory."""


async def running(sandbox: AsyncSandbox, mark: str) -> list[str]:
    """Return the command lines inside that contain this mark."""
    result = await sandbox.exec(_COMMAND_LINES, timeout=20)
    lines = result.stdout.replace("\0", " ").split("==> /proc/")
    return [line for line in lines if mark in line]


async def zombies(sandbox: AsyncSandbox) -> list[str]:
    """Return the processes that have ended and were not reaped, except those of the command that looks."""
    result = await sandbox.exec(_STATES, timeout=20)
    return [line for line in result.stdout.splitlines() if line.rpartition(")")[2].split()[:1] == ["Z"]]


async def until_running(sandbox: AsyncSandbox, mark: str) -> None:
    async def seen() -> bool:
        return bool(await running(sandbox, mark))

    await until(seen, "the command that was started is not running")


async def until_gone(sandbox: AsyncSandbox, mark: str, sentence: str) -> None:
    async def gone() -> bool:
        return not await running(sandbox, mark)

    await until(gone, sentence)
