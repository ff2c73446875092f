"""`atoll ls`, `atoll rm`, `atoll gc`: what exists on this machine, also what a program that died has left."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from atoll.engines import registry
from atoll.engines.base import Collecting, Engine
from atoll.errors import EngineUnavailableError, SandboxNotFoundError
from atoll.model import Handle
from atoll.settings import Settings


def list_sandboxes() -> None:
    """List the sandboxes of this installation."""
    asyncio.run(_list())


def remove(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(help="Their ids.", metavar="ID...")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every sandbox of this installation.")] = False,
) -> None:
    """Delete sandboxes and everything in them."""
    if not sandbox_ids and not all_of_them:
        raise typer.BadParameter("name the sandboxes to delete, or give --all")
    asyncio.run(_remove(None if all_of_them else sandbox_ids))


def gc() -> None:
    """Remove what nobody owns any more: remains of programs that were killed, and images that no name points to."""
    asyncio.run(_gc())


async def _gc() -> None:
    settings = Settings.load()
    removed: list[str] = []
    for name in registry.names():
        engine = registry.get(name, settings)
        if isinstance(engine, Collecting):
            removed += [f"{name}: {text}" for text in await engine.gc()]
        await engine.aclose()
    from atoll.images import Images

    collected = await Images(settings.data_dir).gc()
    removed += [f"image {digest}" for digest in collected.digests]
    print("\n".join(removed) or "nothing to remove")


async def _everything() -> list[tuple[Engine, Handle]]:
    settings = Settings.load()
    engines = [registry.get(name, settings) for name in registry.names()]
    found: list[tuple[Engine, Handle]] = []
    for engine in engines:
        try:
            found += [(engine, handle) for handle in await engine.list()]
        except EngineUnavailableError as error:
            print(f"{engine.name}: not looked at: {error.reason}", file=sys.stderr)
    return found


async def _list() -> None:
    table = Table(box=None, padding=(0, 2))
    for column in ("id", "engine", "image", "state", "age"):
        table.add_column(column, header_style="bold")
    for engine, handle in await _everything():
        seen = await engine.inspect(handle)
        state = f"{seen.state} ({seen.cause})" if seen.cause else str(seen.state)
        table.add_row(handle.sandbox_id, engine.name, handle.spec.image, state, _age(time.time() - handle.created_at))
    Console(highlight=False).print(table)


async def _remove(ids: list[str] | None) -> None:
    found = await _everything()
    known = {handle.sandbox_id for _, handle in found}
    for id in ids or ():
        if id not in known:
            raise SandboxNotFoundError(f"Sandbox {id} not found", hint="`atoll ls` lists them.")
    for engine, handle in found:
        if ids is None or handle.sandbox_id in ids:
            await engine.delete(handle)
            print(handle.sandbox_id)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
