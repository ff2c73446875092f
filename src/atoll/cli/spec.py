"""`atoll spec`: the server's catalogue of specs."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from atoll.cli.options import FileOption, SetupOption, read_spec_file
from atoll.cli.target import JsonOption, ask_server, list_from_server, open_server, show
from atoll.errors import ImageError, SpecError

app = typer.Typer(help="The server's catalogue of specs.", no_args_is_help=True, rich_markup_mode=None)
_LOOK_EVERY_S = 0.3


@app.command("ls")
def list_specs(as_json: JsonOption = False) -> None:
    """List the specs that sandboxes can be made from."""
    found = list_from_server("/sandbox-specs/search")
    columns = ("id", "image", "image_status", "working_dir", "owner_id", "is_default")
    show(found if as_json else [{name: spec[name] for name in columns} for spec in found], as_json)


@app.command("create")
def create_spec(
    id: Annotated[str, typer.Argument(help="The id of the new spec.")],
    image: Annotated[str, typer.Option(help="The root file system.")] = "host",
    memory: Annotated[str | None, typer.Option(help="The memory limit, for example 512m.")] = None,
    cpus: Annotated[float | None, typer.Option(help="The CPU limit.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Share the spec with everybody.")] = False,
    setup: SetupOption = None,
    file: FileOption = None,
) -> None:
    """Add a spec to the catalogue."""
    flags = {"image": None if image == "host" else image, "memory": memory, "cpus": cpus, "setup": setup or None}
    given = {name: value for name, value in flags.items() if value is not None}
    if file is not None and given:
        raise SpecError(f"give either a file or {', '.join(given)}, not both")
    body = {"id": id, "settings": given if file is None else read_spec_file(file), "shared": shared}
    print(ask_server("POST", "/sandbox-specs", safe=False, json=body)["id"])


@app.command("pull")
def pull_spec(id: Annotated[str, typer.Argument(help="The id of the spec.")]) -> None:
    """Fetch the image of a spec on the server, and show the progress."""
    asyncio.run(_pull(id))


@app.command("rm")
def remove_spec(id: Annotated[str, typer.Argument(help="The id of the spec.")]) -> None:
    """Remove a spec. Sandboxes that were made from it are not affected."""
    ask_server("DELETE", f"/sandbox-specs/{id}")
    print(id)


async def _pull(id: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TimeElapsedColumn())
    async with open_server() as server:
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
    if info["image_status"] != "ready":
        raise ImageError(f"the image {info['image']} is not ready: {info['image_detail']}")
    print(f"{info['image']} is ready")
