"""`atoll create`, `ls`, `rm`, `gc`, `pause`, `resume`, `keep-alive`: sandboxes that outlive a command, including those
that a program has left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.image_progress import fetch_image
from atoll.cli.options import SandboxFlags, make_sandbox, pair, refuse_together, with_sandbox_flags
from atoll.cli.target import (
    JsonOption,
    SandboxArgument,
    age,
    attach,
    called,
    everything,
    iso_time,
    on_sandbox,
    open_server,
    print_json,
    server_url,
    show,
)
from atoll.errors import EngineUnavailableError

if TYPE_CHECKING:
    from atoll.model import ListedSandbox
    from atoll.sandbox.export import Export
    from atoll.sandbox.sandbox import AsyncSandbox


@with_sandbox_flags
def create(
    wanted: SandboxFlags,
    spec: Annotated[
        str | None, typer.Option(help="Make the sandbox from this spec of the server's catalogue, or from `manus`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox that stays until it is removed, and print its id."""
    here = spec is None or server_url() is None
    id = asyncio.run(_create(wanted, spec) if here else _create_from(str(spec), wanted))
    if as_json:
        print_json({"id": id})
    else:
        print(id)


_BESIDE_SPEC = ("env", "lifetime", "name", "task_id", "labels", "ports")
"""The options that add to a spec of the catalogue."""


async def _create(wanted: SandboxFlags, spec: str | None) -> str:
    from atoll.model.named_specs import options_of

    sandbox = make_sandbox(wanted, {} if spec is None else options_of(spec))
    await fetch_image(sandbox)
    await sandbox.create()
    id = sandbox.access.listed_id()
    await sandbox.detach()
    return id


async def _create_from(spec: str, wanted: SandboxFlags) -> str:
    refuse_together("--spec", wanted, _BESIDE_SPEC)
    body = wanted.given()
    exposed = [{"name": name, "port": number} for name, number in body.pop("ports", {}).items()]
    async with open_server() as server:
        info = await server.call(
            "POST", "/sandboxes", safe=False, json={**body, "sandbox_spec_id": spec, "exposed_ports": exposed}
        )
    return str(info["id"])


def list_sandboxes(
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="K=V", help="List only sandboxes with this label; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the sandboxes of this installation, or yours on the server."""
    from atoll.model.manus_names import TASK_LABEL

    wanted = dict(pair(text, "a label") for text in label or ()).items()
    found = [each for each in asyncio.run(_listed()) if wanted <= each.labels.items()]
    if as_json:
        show([{**dataclasses.asdict(each), "created_at": iso_time(each.created_at)} for each in found], True)
        return
    show(
        [
            {
                "id": each.id,
                "name": each.name or each.labels.get(TASK_LABEL),
                "engine": each.engine,
                "image": each.image,
                "state": f"{each.state} ({each.cause})" if each.cause else str(each.state),
                "age": age(each.created_at),
            }
            for each in found
        ],
        False,
    )


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
    from atoll.builds import sweep
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
                removed += [f"{name}: sandbox {id} of a build" for id in await sweep(engine)]
                removed += [f"{name}: {text}" for text in await engine.gc()]
    collected = await Images(settings.data_dir).gc()
    removed += [f"image {digest}" for digest in collected.digests]
    print("\n".join(removed) or "nothing to remove")


async def _listed() -> list[ListedSandbox]:
    from atoll.sandbox.class_methods import listed
    from atoll.sandbox.sandbox_access import EngineChoice
    from atoll.settings import Settings

    return await listed(EngineChoice("auto", None, None, Settings.load()), _not_asked)


def _not_asked(engine: str, error: EngineUnavailableError) -> None:
    # Without Docker there is nothing to list. With DOCKER_HOST set, the user expects to learn that it is unavailable.
    if engine != "docker" or os.environ.get("DOCKER_HOST"):
        print(f"{engine}: not looked at: {error.reason}", file=sys.stderr)


async def _remove_from_server(ids: list[str] | None, export: Export | None) -> None:
    async with open_server() as server:
        for id in ids if ids is not None else [each.id for each in await _listed()]:
            if export is not None:
                await _export(await attach(id), export, id)
            await server.call("DELETE", f"/sandboxes/{id}")
            print(id)


async def _remove(ids: list[str] | None, export: Export | None) -> None:
    from atoll.sandbox.sandbox import AsyncSandbox

    found = await everything()
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
