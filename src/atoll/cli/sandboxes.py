"""`atoll create`, `ls`, `rm`, `gc`, `pause`, `resume`, `keep-alive`: sandboxes that outlive a command, including those
that a program has left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import FileOption, FullSandboxOptions, TaskOption, make_sandbox, with_sandbox_options
from atoll.cli.ports import PortOption, named_ports
from atoll.cli.target import (
    JsonOption,
    SandboxArgument,
    age,
    attach,
    called,
    on_sandbox,
    open_server,
    print_json,
    server_url,
    show,
)
from atoll.errors import EngineUnavailableError

if TYPE_CHECKING:
    from atoll.engines.contract import Engine
    from atoll.model import Handle
    from atoll.sandbox.export import Export
    from atoll.sandbox.sandbox import AsyncSandbox


@with_sandbox_options
def create(
    wanted: FullSandboxOptions,
    task: TaskOption = None,
    port: PortOption = None,
    spec: Annotated[str | None, typer.Option(help="Make the sandbox from this spec of the server's catalogue.")] = None,
    file: FileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox that stays until it is removed, and print its id."""
    ports = named_ports(port)

    async def work() -> None:
        if spec is not None:
            listed = [{"name": name, "port": number} for name, number in ports.items()]
            body = {"sandbox_spec_id": spec, "exposed_ports": listed, **({"task_id": task} if task is not None else {})}
            async with open_server() as server:
                info = await server.call("POST", "/sandboxes", safe=False, json=body)
            id = str(info["id"])
        else:
            made = make_sandbox(wanted, task=task, file=file, ports=ports)
            sandbox = await made.create()
            id = sandbox.access.listed_id()
            await sandbox.detach()
        if as_json:
            print_json({"id": id})
        else:
            print(id)

    asyncio.run(work())


def list_sandboxes(as_json: JsonOption = False) -> None:
    """List the sandboxes of this installation, or yours on the server."""
    show(asyncio.run(_list_server() if server_url() else _list()), as_json)


def remove(
    sandbox_ids: Annotated[
        list[str] | None, typer.Argument(help="The ids, names or tasks of the sandboxes.", metavar="ID...")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Delete every sandbox that `atoll ls` lists.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Before deleting, copy the results of each sandbox to DIRECTORY/ID.",
            metavar="DIRECTORY",
            file_okay=False,
        ),
    ] = None,
    export_from: Annotated[
        str, typer.Option(help="The path of the results inside the sandbox.", metavar="PATH")
    ] = "/output",
) -> None:
    """Delete sandboxes and everything in them. A sandbox whose files cannot be exported is kept."""
    if not sandbox_ids and not all_of_them:
        raise typer.BadParameter("name the sandboxes to delete, or give --all")
    from atoll.sandbox.export import Export

    wanted = None if all_of_them else sandbox_ids
    results = Export(export, source=export_from) if export is not None else None
    asyncio.run(_remove_from_server(wanted, results) if server_url() else _remove(wanted, results))


def gc() -> None:
    """Remove what nobody owns any more: remains of killed programs, and images without a name."""
    asyncio.run(_gc())


def pause(
    sandbox_id: SandboxArgument,
    disk: Annotated[
        bool,
        typer.Option(
            "--disk", help="Save the memory to disk, so that the sandbox uses none; requires a sandbox with gVisor."
        ),
    ] = False,
) -> None:
    """Pause a sandbox: stop its processes where they are."""
    on_sandbox(sandbox_id, lambda sandbox: sandbox.pause(memory="disk" if disk else "ram"))


def resume(sandbox_id: SandboxArgument) -> None:
    """Resume a paused sandbox."""
    on_sandbox(sandbox_id, lambda sandbox: sandbox.resume())


def keep_alive(
    sandbox_id: SandboxArgument,
    seconds: Annotated[float, typer.Argument(help="How long, counted from now; at most one day.", min=1, max=86400)],
) -> None:
    """Count a sandbox as in use for a while, so that it is neither ended nor paused for being idle."""
    on_sandbox(sandbox_id, lambda sandbox: sandbox.keep_alive(seconds))


async def _gc() -> None:
    from atoll.engines import leases, registry
    from atoll.engines.contract import GarbageCollecting
    from atoll.images import Images
    from atoll.settings import Settings

    settings = Settings.load()
    removed: list[str] = []
    for name in registry.names():
        engine = (await leases.acquire(name, settings)).engine
        if isinstance(engine, GarbageCollecting):
            with suppress(EngineUnavailableError):  # an engine that is unavailable has nothing to remove
                removed += [f"{name}: {text}" for text in await engine.gc()]
    collected = await Images(settings.data_dir).gc()
    removed += [f"image {digest}" for digest in collected.digests]
    print("\n".join(removed) or "nothing to remove")


async def _everything() -> list[tuple[Engine, Handle]]:
    from atoll.engines import leases, registry
    from atoll.settings import Settings

    settings = Settings.load()
    engines = [(await leases.acquire(name, settings)).engine for name in registry.names()]
    found: list[tuple[Engine, Handle]] = []
    for engine in engines:
        try:
            found += [(engine, handle) for handle in await engine.list()]
        except EngineUnavailableError as error:
            # Without Docker there is nothing to list. With DOCKER_HOST set, the user expects to learn that it is
            # unavailable.
            if engine.name != "docker" or os.environ.get("DOCKER_HOST"):
                print(f"{engine.name}: not looked at: {error.reason}", file=sys.stderr)
    return found


async def _list_server() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    query = {"limit": "100"}
    async with open_server() as server:
        while True:
            answer = await server.call("GET", "/sandboxes/search", params=query)
            for info in answer["items"]:
                state = f"{info['state']} ({info['cause']})" if info["cause"] else info["state"]
                since = datetime.fromisoformat(info["created_at"]).timestamp()
                row = {"id": info["id"], "engine": info["engine"], "image": info["image"], "state": state}
                rows.append({**row, "age": age(since)})
            if answer["next_page_id"] is None:
                return rows
            query["page_id"] = answer["next_page_id"]


async def _list() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for engine, handle in await _everything():
        seen = await engine.inspect(handle)
        state = f"{seen.state} ({seen.cause})" if seen.cause else str(seen.state)
        made, image = age(handle.created_at), handle.spec.image
        rows.append({"id": handle.sandbox_id, "engine": engine.name, "image": image, "state": state, "age": made})
    return rows


async def _remove_from_server(ids: list[str] | None, export: Export | None) -> None:
    async with open_server() as server:
        for id in ids if ids is not None else [str(row["id"]) for row in await _list_server()]:
            if export is not None:
                await _export(await attach(id), export, id)
            await server.call("DELETE", f"/sandboxes/{id}")
            print(id)


async def _remove(ids: list[str] | None, export: Export | None) -> None:
    from atoll.sandbox.sandbox import AsyncSandbox

    found = await _everything()
    if ids is None:
        wanted = {handle.sandbox_id: (engine, handle, handle.sandbox_id) for engine, handle in found}
    else:
        wanted = {handle.sandbox_id: (engine, handle, id) for id in ids for engine, handle in [called(id, found)]}
    for engine, handle, id in wanted.values():
        if export is not None:
            await _export(await AsyncSandbox.attach(handle.sandbox_id, engine=engine), export, id)
        await engine.delete(handle)
        print(handle.sandbox_id)


async def _export(sandbox: AsyncSandbox, export: Export, id: str) -> None:
    from atoll.model import manus_names

    try:
        # A label may be any text: only a plain name may become part of a path here.
        folder = id if manus_names.is_plain(id) else sandbox.id
        await dataclasses.replace(export, target=Path(export.target, folder)).run(sandbox)
    finally:
        await sandbox.detach()
