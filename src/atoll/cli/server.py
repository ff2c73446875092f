"""`atoll spec`, `key`, `events`, `config`: what only a server has."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from atoll.cli import spec_file
from atoll.cli.options import SetupOption
from atoll.cli.spec_file import FileOption
from atoll.cli.target import JsonOption, print_json, show, the_server
from atoll.errors import EngineUnavailableError, ImageError, SpecError

spec_app = typer.Typer(help="The server's catalogue of specs.", no_args_is_help=True, rich_markup_mode=None)
key_app = typer.Typer(help="API keys of a server.", no_args_is_help=True, rich_markup_mode=None)


_LOOK_EVERY_S = 0.3
_NOT_BEGUN = {"stage": "wait", "detail": "", "done_bytes": 0, "total_bytes": None}


def _call(method: str, path: str, **options: Any) -> Any:
    async def ask() -> Any:
        server = the_server()
        try:
            return await server.call(method, path, **options)
        finally:
            await server.aclose()

    return asyncio.run(ask())


@spec_app.command("ls")
def list_specs(as_json: JsonOption = False) -> None:
    """List the specs that sandboxes can be made from."""
    found = _call("GET", "/sandbox-specs/search")["items"]
    columns = ("id", "image", "image_status", "working_dir", "owner_id", "is_default")
    show(found if as_json else [{name: spec[name] for name in columns} for spec in found], as_json)


@spec_app.command("create")
def create_spec(
    id: Annotated[str, typer.Argument(help="A name for it.")],
    image: Annotated[str, typer.Option(help="The root file system.")] = "host",
    memory: Annotated[str | None, typer.Option(help="Most memory, for example 512m.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Most CPUs.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="For everybody.")] = False,
    setup: SetupOption = None,
    file: FileOption = None,
) -> None:
    """Add a spec to the catalogue."""
    flags = {"image": None if image == "host" else image, "memory": memory, "cpus": cpus, "setup": setup or None}
    given = {name: value for name, value in flags.items() if value is not None}
    if file is not None and given:
        raise SpecError(f"give either a file or {', '.join(given)}, not both")
    body = {"id": id, "settings": given if file is None else spec_file.read(file), "shared": shared}
    print(_call("POST", "/sandbox-specs", safe=False, json=body)["id"])


@spec_app.command("pull")
def pull_spec(id: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Get the image of a spec ready on the server, and show how far it is."""
    asyncio.run(_pull(id))


@spec_app.command("rm")
def remove_spec(id: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Remove a spec. Sandboxes that were made from it stay."""
    _call("DELETE", f"/sandbox-specs/{id}")
    print(id)


async def _pull(id: str) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TimeElapsedColumn())
    server = the_server()
    try:
        info = await server.call("POST", f"/sandbox-specs/{id}/pull")
        with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bars:
            bar = bars.add_task(f"getting {info['image']}", total=None)
            while info["image_status"] == "pulling":
                step = info["image_progress"] or {
                    "stage": "waiting",
                    "detail": "",
                    "done_bytes": 0,
                    "total_bytes": None,
                }
                what = f"getting {info['image']}: {step['stage']} {step['detail'][:48]}"
                bars.update(bar, description=what, completed=step["done_bytes"], total=step["total_bytes"])
                await asyncio.sleep(_LOOK_EVERY_S)
                info = await server.call("GET", f"/sandbox-specs/{id}")
    finally:
        await server.aclose()
    if info["image_status"] != "ready":
        raise ImageError(f"the image {info['image']} is not ready: {info['image_detail']}")
    print(f"{info['image']} is ready")


@key_app.command("ls")
def list_keys(as_json: JsonOption = False) -> None:
    """List keys, without their secrets."""
    show(_call("GET", "/keys"), as_json)


@key_app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    user: Annotated[str | None, typer.Option(help="Whose; for administrators.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="What it is good for; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it: it is never shown again."""
    body = {"name": name, **({"user_id": user} if user else {}), **({"scopes": scope} if scope else {})}
    made = _call("POST", "/keys", safe=False, json=body)
    if as_json:
        print_json(made)
    else:
        print(made["key"])


@key_app.command("revoke")
def revoke_key(id: Annotated[str, typer.Argument(help="Its id, as listed.")]) -> None:
    """Refuse a key from now on."""
    _call("DELETE", f"/keys/{id}", safe=False)
    print(id)


def events(
    after: Annotated[int, typer.Option(help="Only what comes after this number.")] = 0,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    kind: Annotated[str | None, typer.Option(help="Only these: state, port, health or callback.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to your sandboxes on the server."""
    found = _call("GET", "/events", params={"after": after, "limit": limit, **({"kind": kind} if kind else {})})[
        "items"
    ]
    columns = ("number", "at", "sandbox_id", "kind", "before", "after", "cause", "reason")
    show(found if as_json else [{name: event[name] for name in columns} for event in found], as_json)


def config(as_json: JsonOption = False) -> None:
    """Show every setting of `atoll serve`: its value here, and how to set it."""
    try:
        from atoll.server.settings import PREFIX, ServerSettings
    except ImportError as error:
        raise EngineUnavailableError(
            f"the server needs more packages: {error}", hint="pip install 'atoll[server]'"
        ) from error
    settings = ServerSettings.load()
    values = json.loads(settings.model_dump_json())
    if as_json:
        print_json(values)
        return
    show(
        [
            {"setting": name, "value": values[name], "variable": PREFIX + name.upper(), "meaning": field.description}
            for name, field in ServerSettings.model_fields.items()
        ],
        False,
    )
