"""`atoll ls`, `atoll rm`, `atoll gc`: what exists on this machine, also what a program that died has left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from atoll import manus
from atoll.cli import words
from atoll.cli.target import JsonOption, attach, called, server_url, show, the_server
from atoll.engines import registry, shared
from atoll.engines.base import Collecting, Engine
from atoll.errors import EngineUnavailableError
from atoll.export import Export
from atoll.model import Handle
from atoll.sandbox import AsyncSandbox
from atoll.settings import Settings


def list_sandboxes(as_json: JsonOption = False) -> None:
    """List the sandboxes of this installation, or yours on the server."""
    show(asyncio.run(_list_server() if server_url() else _list()), as_json)


def remove(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(help="Their ids, names or tasks.", metavar="ID...")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every sandbox of this installation.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(help="Copy the results of each to DIRECTORY/ID first.", metavar="DIRECTORY", file_okay=False),
    ] = None,
    export_from: Annotated[str, typer.Option(help="Where the results are in the sandbox.", metavar="PATH")] = "/output",
) -> None:
    """Delete sandboxes and everything in them. One whose files cannot be exported stays."""
    if not sandbox_ids and not all_of_them:
        raise typer.BadParameter("name the sandboxes to delete, or give --all")
    wanted = None if all_of_them else sandbox_ids
    results = Export(export, source=export_from) if export is not None else None
    asyncio.run(_remove_from_server(wanted, results) if server_url() else _remove(wanted, results))


def gc() -> None:
    """Remove what nobody owns any more: remains of programs that were killed, and images that no name points to."""
    asyncio.run(_gc())


async def _gc() -> None:
    settings = Settings.load()
    removed: list[str] = []
    for name in registry.names():
        engine = (await shared.acquire(name, settings)).engine
        if isinstance(engine, Collecting):
            with suppress(EngineUnavailableError):  # an engine that is not here has nothing of ours
                removed += [f"{name}: {text}" for text in await engine.gc()]
    from atoll.images import Images

    collected = await Images(settings.data_dir).gc()
    removed += [f"image {digest}" for digest in collected.digests]
    print("\n".join(removed) or "nothing to remove")


async def _everything() -> list[tuple[Engine, Handle]]:
    settings = Settings.load()
    engines = [(await shared.acquire(name, settings)).engine for name in registry.names()]
    found: list[tuple[Engine, Handle]] = []
    for engine in engines:
        try:
            found += [(engine, handle) for handle in await engine.list()]
        except EngineUnavailableError as error:
            # Without Docker there is nothing to look at; somebody who names an engine wants to know that it is away.
            if engine.name != "docker" or os.environ.get("DOCKER_HOST"):
                print(f"{engine.name}: not looked at: {error.reason}", file=sys.stderr)
    return found


async def _list_server() -> list[dict[str, object]]:
    server = the_server()
    rows: list[dict[str, object]] = []
    page: str | None = None
    while True:
        query = {"limit": "100"} | ({"page_id": page} if page else {})
        answer = await server.call("GET", "/sandboxes/search", params=query)
        for info in answer["items"]:
            state = f"{info['state']} ({info['cause']})" if info["cause"] else info["state"]
            age = words.age(datetime.fromisoformat(info["created_at"]).timestamp())
            rows.append(
                {"id": info["id"], "engine": info["engine"], "image": info["image"], "state": state, "age": age}
            )
        page = answer["next_page_id"]
        if page is None:
            await server.aclose()
            return rows


async def _list() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for engine, handle in await _everything():
        seen = await engine.inspect(handle)
        state = f"{seen.state} ({seen.cause})" if seen.cause else str(seen.state)
        age = words.age(handle.created_at)
        image = handle.spec.image
        rows.append({"id": handle.sandbox_id, "engine": engine.name, "image": image, "state": state, "age": age})
    return rows


async def _remove_from_server(ids: list[str] | None, export: Export | None) -> None:
    server = the_server()
    for id in ids if ids is not None else [str(row["id"]) for row in await _list_server()]:
        if export is not None:
            await _export(await attach(id), export, id)
        await server.call("DELETE", f"/sandboxes/{id}")
        print(id)
    await server.aclose()


async def _remove(ids: list[str] | None, export: Export | None) -> None:
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
    try:
        # A label may be any text: only a plain name becomes part of a path here.
        folder = id if manus.is_plain(id) else sandbox.id
        await dataclasses.replace(export, target=Path(export.target, folder)).run(sandbox)
    finally:
        await sandbox.detach()
