"""`atoll checkpoint`, `checkpoints`, `rollback`, `diff`, `undo`, `restart`, `fork`, and `atoll snapshot ...`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from atoll.checkpoint import Checkpoint
from atoll.cli.target import attach, server_url, the_server
from atoll.cli.words import age, size
from atoll.engines import registry
from atoll.engines.base import Checkpointing, Engine
from atoll.errors import UnsupportedError
from atoll.model import Capability
from atoll.sandbox import AsyncSandbox
from atoll.settings import Settings

SandboxArgument = Annotated[str, typer.Argument(metavar="SANDBOX", help="Its id; see `atoll ls`.")]
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Its id or name.")]
MemoryOption = Annotated[bool, typer.Option("--memory", help="Also what runs in it; needs --isolation gvisor.")]
EngineOption = Annotated[str, typer.Option("--engine", help="Whose they are; `native` and `oci` share theirs.")]

snapshots = typer.Typer(
    help="Kept states that new sandboxes can start from: --image snapshot:NAME.", no_args_is_help=True
)


def checkpoint(
    sandbox: SandboxArgument,
    name: Annotated[str, typer.Option("--name", help="To find it again by.")] = "",
    memory: MemoryOption = False,
    delete: Annotated[str, typer.Option("--delete", metavar="CHECKPOINT", help="Delete one instead.")] = "",
) -> None:
    """Keep the state of a sandbox's files. Prints the id of the checkpoint."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            if delete:
                await found.delete_checkpoint(delete)
            else:
                print((await found.checkpoint(name, memory=memory)).id)

    asyncio.run(work())


def checkpoints(sandbox: SandboxArgument) -> None:
    """List the checkpoints of a sandbox, as a tree."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            _show(await found.checkpoints())

    asyncio.run(work())


def rollback(sandbox: SandboxArgument, checkpoint: CheckpointArgument) -> None:
    """Go back: processes end, files are as they were."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            await found.rollback(checkpoint)

    asyncio.run(work())


def restart(sandbox: SandboxArgument) -> None:
    """Go back to the state right after it was created."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            await found.restart()

    asyncio.run(work())


def undo(
    sandbox: SandboxArgument, steps: Annotated[int, typer.Option("--steps", min=1, help="How many commands.")] = 1
) -> None:
    """Take back the last commands of a sandbox that was made with undo."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            print(f"back to the state {(await found.undo(steps)).made_by}")

    asyncio.run(work())


def diff(
    sandbox: SandboxArgument,
    old: CheckpointArgument,
    new: Annotated[str | None, typer.Argument(metavar="[CHECKPOINT]", help="Default: now.")] = None,
    text: Annotated[bool, typer.Option("--text", "-p", help="Also what changed in texts.")] = False,
) -> None:
    """What was added (A), changed (C) and removed (R) since a checkpoint."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            for change in await found.diff(old, new, text=text):
                print(change)
                if change.text:
                    print(change.text, end="")
                elif change.omitted is not None:
                    print(f"  (no text difference: {change.omitted})")

    asyncio.run(work())


def fork(
    sandbox: SandboxArgument,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Default: as it is now.")] = None,
    memory: MemoryOption = False,
) -> None:
    """New sandboxes that begin with the files of another. Prints their ids."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            for twin in await found.fork(count, checkpoint, memory=memory):
                print(twin._created().details.get("remote_id", twin.id))  # on a server: the id it has there
                await twin.detach()

    asyncio.run(work())


@snapshots.command("create")
def create_snapshot(
    sandbox: SandboxArgument,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Default: as it is now.")] = None,
    memory: MemoryOption = False,
) -> None:
    """Keep a state under a name, also after the sandbox is gone."""

    async def work() -> None:
        async with _attached(sandbox) as found:
            await found.snapshot(name, checkpoint, memory=memory)
        print(f"snapshot:{name}")

    asyncio.run(work())


@snapshots.command("ls")
def list_snapshots(engine: EngineOption = "native") -> None:
    """List them."""

    async def work() -> None:
        table = _table("name", "image", "size", "age", "from")
        async with _keeper(engine) as keeper:
            for each in await keeper.snapshots():
                table.add_row(each.name, each.image, size(each.size_bytes), age(each.created_at), each.source)
        Console(highlight=False).print(table)

    asyncio.run(work())


@snapshots.command("rm")
def remove_snapshots(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")], engine: EngineOption = "native"
) -> None:
    """Delete them. Sandboxes that came from them are not affected."""

    async def work() -> None:
        async with _keeper(engine) as keeper:
            for name in names:
                await keeper.delete_snapshot(name)

    asyncio.run(work())


@snapshots.command("export")
def export_snapshot(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    engine: EngineOption = "native",
) -> None:
    """Write one to a file, for another machine."""

    async def work() -> None:
        async with _keeper(engine) as keeper:
            with Console(stderr=True).status(f"writing {file}"):
                await keeper.export_snapshot(name, file)

    asyncio.run(work())


@snapshots.command("import")
def import_snapshot(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    name: Annotated[str, typer.Argument(metavar="NAME")],
    memory: Annotated[bool, typer.Option("--memory", help="Also its memory: only of files that you trust.")] = False,
    engine: EngineOption = "native",
) -> None:
    """Take over a file that `export` wrote. It is checked first."""

    async def work() -> None:
        async with _keeper(engine) as keeper:
            with Console(stderr=True).status(f"reading {file}"):
                await keeper.import_snapshot(file, name, memory=memory)
        print(f"snapshot:{name}")

    asyncio.run(work())


@asynccontextmanager
async def _attached(sandbox_id: str) -> AsyncIterator[AsyncSandbox]:
    sandbox = await attach(sandbox_id)
    try:
        yield sandbox
    finally:
        await sandbox.detach()


@asynccontextmanager
async def _keeper(name: str) -> AsyncIterator[Checkpointing]:
    """Snapshots belong to the user on the server, or to the machine: engines that can keep them share them."""
    engine: Engine = the_server() if server_url() is not None else registry.get(name, Settings.load())
    try:
        if Capability.CHECKPOINTS not in engine.capabilities or not isinstance(engine, Checkpointing):
            where = "on the server" if server_url() is not None else "here"
            raise UnsupportedError(
                f"engine '{engine.name}' cannot keep snapshots {where}",
                hint="With 'native' and 'oci' they need root and btrfs-progs ('apt-get install btrfs-progs').",
            )
        yield engine
    finally:
        await engine.aclose()


def _show(found: list[Checkpoint]) -> None:
    table = _table("id", "name", "size", "age", "made by")
    children: dict[str | None, list[Checkpoint]] = {}
    known = {each.id for each in found}
    for each in found:
        children.setdefault(each.parent if each.parent in known else None, []).append(each)

    waiting = [(each, 0) for each in reversed(children.get(None, []))]
    while waiting:
        each, depth = waiting.pop()
        # A line of states one after the other stays flat; only where it branches it goes deeper.
        below = children.get(each.id, [])
        table.add_row("  " * depth + each.id, each.name, size(each.size_bytes), age(each.created_at), each.made_by)
        waiting += [(child, depth + (len(below) > 1)) for child in reversed(below)]
    Console(highlight=False).print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for column in columns:
        table.add_column(column, header_style="bold")
    return table
