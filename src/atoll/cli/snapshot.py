"""`atoll snapshot`: saved states that new sandboxes can start from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.checkpoints import MemoryOption, SandboxArgument
from atoll.cli.target import (
    JsonOption,
    age,
    attached,
    iso_time,
    print_json,
    server_url,
    show,
    size,
    the_server,
)
from atoll.errors import UnsupportedError

if TYPE_CHECKING:
    from atoll.engines.checkpointing import Checkpointing
    from atoll.engines.contract import Engine

EngineOption = Annotated[
    str, typer.Option("--engine", help="The engine that keeps the snapshots; `native` and `oci` share them.")
]

app = typer.Typer(help="Saved states that new sandboxes can start from: --image snapshot:NAME.", no_args_is_help=True)


@app.command("create")
def create_snapshot(
    sandbox: SandboxArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the snapshot.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="The checkpoint to save; default: the present state.")
    ] = None,
    memory: MemoryOption = False,
) -> None:
    """Save the state of a sandbox under a name. The snapshot outlives the sandbox."""

    async def work() -> None:
        async with attached(sandbox) as found:
            await found.snapshot(name, checkpoint, memory=memory)
        print(f"snapshot:{name}")

    asyncio.run(work())


@app.command("ls")
def list_snapshots(engine: EngineOption = "native", as_json: JsonOption = False) -> None:
    """List snapshots."""

    async def work() -> None:
        async with _keeper(engine) as keeper:
            found = await keeper.snapshots()
        if as_json:
            print_json([{**asdict(each), "created_at": iso_time(each.created_at)} for each in found])
            return
        columns = ("name", "image", "size", "age", "from")
        rows = [(each.name, each.image, size(each.size_bytes), age(each.created_at), each.source) for each in found]
        show([dict(zip(columns, row, strict=True)) for row in rows], False)

    asyncio.run(work())


@app.command("rm")
def remove_snapshots(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")], engine: EngineOption = "native"
) -> None:
    """Delete snapshots. Sandboxes that were made from them are not affected."""

    async def work() -> None:
        async with _keeper(engine) as keeper:
            for name in names:
                await keeper.delete_snapshot(name)

    asyncio.run(work())


@app.command("export")
def export_snapshot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the snapshot.")],
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    engine: EngineOption = "native",
) -> None:
    """Write a snapshot to a file, for another machine."""

    from rich.console import Console

    async def work() -> None:
        async with _keeper(engine) as keeper:
            with Console(stderr=True).status(f"writing {file}"):
                await keeper.export_snapshot(name, file)

    asyncio.run(work())


@app.command("import")
def import_snapshot(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the snapshot.")],
    memory: Annotated[
        bool, typer.Option("--memory", help="Also import its saved memory; only for files that you trust.")
    ] = False,
    engine: EngineOption = "native",
) -> None:
    """Import a file that `export` wrote. It is checked first."""

    from rich.console import Console

    async def work() -> None:
        async with _keeper(engine) as keeper:
            with Console(stderr=True).status(f"reading {file}"):
                await keeper.import_snapshot(file, name, memory=memory)
        print(f"snapshot:{name}")

    asyncio.run(work())


@asynccontextmanager
async def _keeper(name: str) -> AsyncIterator[Checkpointing]:
    """Yield the engine that has the snapshots. They belong to the user on a server, or to the machine, where engines
    share them."""
    from atoll.engines import registry
    from atoll.engines.checkpointing import Checkpointing
    from atoll.engines.contract import supporting
    from atoll.settings import Settings

    engine: Engine = the_server() if server_url() is not None else registry.get(name, Settings.load())
    try:
        keeper = await supporting(engine, Checkpointing)
        if keeper is None:
            where = "on the server" if server_url() is not None else "here"
            raise UnsupportedError(
                f"engine '{engine.name}' cannot keep snapshots {where}",
                hint="With 'native' and 'oci' they need root and btrfs-progs ('apt-get install btrfs-progs').",
            )
        yield keeper
    finally:
        await engine.aclose()
