"""`atoll volume`: directories that outlive the sandboxes which mount them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.target import JsonOption, age, iso_time, print_json, server_url, show, size, the_server
from atoll.errors import SpecError

if TYPE_CHECKING:
    from atoll.engines.contract import Engine
    from atoll.engines.named_volumes import NamedVolumes
    from atoll.model.volume import VolumeInfo

EngineOption = Annotated[
    str, typer.Option("--engine", help="The engine that has the volumes; `native` and `oci` share them.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the volume.")]
SizeOption = Annotated[
    str | None, typer.Option("--size", help="How much it can hold, for example 2g; default: the setting.")
]

app = typer.Typer(
    help="Named volumes, which outlive the sandboxes that mount them: -v NAME:/path.", no_args_is_help=True
)


@app.command("create")
def create_volume(name: NameArgument, size: SizeOption = None, engine: EngineOption = "native") -> None:
    """Make an empty volume. A sandbox that mounts a volume that does not exist makes it, too."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            print((await volumes.create_volume(name, size_bytes=_bytes(size))).name)

    asyncio.run(work())


@app.command("ls")
def list_volumes(engine: EngineOption = "native", as_json: JsonOption = False) -> None:
    """List volumes."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            found = await volumes.volumes()
        if as_json:
            print_json([_shown(each, users=False) for each in found])
            return
        columns = ("name", "size", "used", "age", "from")
        rows = [
            (each.name, _size(each.size_bytes), _size(each.used_bytes), age(each.created_at), _origin(each))
            for each in found
        ]
        show([dict(zip(columns, row, strict=True)) for row in rows], False)

    asyncio.run(work())


@app.command("inspect")
def inspect_volume(name: NameArgument, engine: EngineOption = "native") -> None:
    """Print what is known about a volume as JSON, with the sandboxes that mount it."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            print_json(_shown(await volumes.volume(name)))

    asyncio.run(work())


@app.command("rm")
def remove_volumes(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")], engine: EngineOption = "native"
) -> None:
    """Remove volumes with everything in them. A volume that a sandbox mounts is not removed."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            for name in names:
                await volumes.volume(name)  # a wrong name is an error
                await volumes.remove_volume(name)

    asyncio.run(work())


@app.command("prune")
def prune_volumes(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, engine: EngineOption = "native"
) -> None:
    """Remove all volumes that no sandbox mounts."""
    if not yes and not typer.confirm("Remove all volumes that no sandbox mounts?"):
        raise typer.Exit(1)

    async def work() -> None:
        from atoll.errors import ConflictError

        async with _volumes(engine) as volumes:
            for each in await volumes.volumes():
                try:
                    await volumes.remove_volume(each.name)
                except ConflictError:
                    continue
                print(each.name)

    asyncio.run(work())


@app.command("snapshot")
def snapshot_volume(
    name: NameArgument,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The name of the snapshot.")],
    engine: EngineOption = "native",
) -> None:
    """Save the present content of a volume as a read-only volume."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            print((await volumes.copy_volume(name, snapshot, read_only=True)).name)

    asyncio.run(work())


@app.command("copy")
def copy_volume(
    name: NameArgument,
    copy: Annotated[str, typer.Argument(metavar="COPY", help="The name of the copy.")],
    size: SizeOption = None,
    engine: EngineOption = "native",
) -> None:
    """Copy a volume or a snapshot to a new, writable volume. Equal blocks are shared."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            print((await volumes.copy_volume(name, copy, size_bytes=_bytes(size))).name)

    asyncio.run(work())


@app.command("restore")
def restore_volume(
    name: NameArgument,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot or volume to restore from.")],
    engine: EngineOption = "native",
) -> None:
    """Replace the content of a volume by that of a snapshot. No sandbox may mount it meanwhile."""

    async def work() -> None:
        async with _volumes(engine) as volumes:
            await volumes.restore_volume(name, snapshot)

    asyncio.run(work())


@app.command("upload")
def upload(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or directory of this machine.")],
    target: Annotated[str, typer.Argument(metavar="NAME[:PATH]", help="The volume, and where the files go in it.")],
    engine: EngineOption = "auto",
) -> None:
    """Copy files and directories into a volume."""
    from atoll.sandbox.volumes import AsyncVolumes

    name, path = _place(target)
    asyncio.run(AsyncVolumes.upload(name, source, path, engine=engine))


@app.command("download")
def download(
    source: Annotated[str, typer.Argument(metavar="NAME[:PATH]", help="The volume, or a path in it.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A path on this machine.")],
    engine: EngineOption = "auto",
) -> None:
    """Copy files and directories out of a volume."""
    from atoll.sandbox.volumes import AsyncVolumes

    name, path = _place(source)
    asyncio.run(AsyncVolumes.download(name, path, target, engine=engine))


def _place(text: str) -> tuple[str, str]:
    name, _, path = text.partition(":")
    if not name or "/" in name:
        raise SpecError(f"'{text}' is not a place in a volume", hint="Write NAME or NAME:PATH.")
    return name, path


def _bytes(text: str | None) -> int | None:
    from atoll.model import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _size(count: int | None) -> str:
    return "" if count is None else size(count)


def _origin(volume: VolumeInfo) -> str:
    if volume.source is None:
        return ""
    return f"snapshot of {volume.source}" if volume.read_only else f"copy of {volume.source}"


def _shown(volume: VolumeInfo, *, users: bool = True) -> dict[str, Any]:
    left_out = {"owner"} if users else {"owner", "users"}
    shown = {name: value for name, value in asdict(volume).items() if name not in left_out}
    return {**shown, "created_at": iso_time(volume.created_at)}


@asynccontextmanager
async def _volumes(name: str) -> AsyncIterator[NamedVolumes]:
    """Yield the engine that has the volumes: the user's on a server, or this machine's."""
    from atoll.engines import registry
    from atoll.engines.contract import having_volumes
    from atoll.settings import Settings

    engine: Engine = the_server() if server_url() is not None else registry.get(name, Settings.load())
    try:
        yield await having_volumes(engine, "on the server" if server_url() is not None else "here")
    finally:
        await engine.aclose()
