"""`atoll image`: the root file systems that sandboxes start from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from atoll.cli.target import size
from atoll.errors import SpecError
from atoll.images import Image, Images, ProgressCallback, Recipe
from atoll.images import Progress as Step
from atoll.settings import Settings

app = typer.Typer(help="Root file systems that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
Reference = Annotated[
    str, typer.Argument(help="host, debian:SUITE, a recipe, tar:FILE, docker:NAME or [REGISTRY/]NAME[:TAG].")
]


def _images() -> Images:
    return Images(Settings.load().data_dir)


@app.command("ls")
def list_images() -> None:
    """List the images that are stored here, and the recipes that can be built."""
    images = _images()
    table = Table(box=None, padding=(0, 2))
    for column in ("name", "digest", "size", "kind"):
        table.add_column(column, header_style="bold")
    table.add_row("host", "", "", "this machine's own /usr")
    stored = asyncio.run(images.ls())
    for image in stored:
        table.add_row(image.reference, image.digest[:19], size(image.size_bytes), image.kind)
    built = {image.reference for image in stored}
    for name, recipe in images.recipes.all().items():
        if name not in built and f"recipe:{name}" not in built:
            table.add_row(name, "", "", f"recipe, not built: {recipe.suite} with {len(recipe.packages)} packages")
    Console(highlight=False).print(table)


@app.command()
def pull(
    reference: Reference,
    plain_http: Annotated[list[str] | None, typer.Option(help="Allow a registry without TLS.")] = None,
) -> None:
    """Fetch an image from a registry, or from the local Docker engine, as it is now."""
    images = Images(Settings.load().data_dir, plain_http_registries=plain_http or ())
    _make(f"pulling {reference}", lambda progress: images.pull(reference, progress))


@app.command()
def build(
    name: Annotated[str, typer.Argument(help="debian:SUITE, a recipe's name, or a new name with --package.")],
    suite: Annotated[str, typer.Option(help="The Debian suite of a new recipe.")] = "bookworm",
    package: Annotated[
        list[str] | None, typer.Option("--package", "-p", help="A package to install; makes a new recipe.")
    ] = None,
) -> None:
    """Build an image from Debian packages."""
    if not package and ("/" in name or name == "." or Path(name).is_dir()):
        raise SpecError(f"{name!r} is a directory, which has a Dockerfile", hint=f"Run: atoll build {name}")
    images = _images()
    wanted: str | Recipe = Recipe(name=name, suite=suite, packages=tuple(package)) if package else name
    _make(f"building {name}", lambda progress: images.build(wanted, progress))


@app.command("import")
def import_image(
    file: Annotated[Path, typer.Argument(help="A tar file of a root file system.", exists=True, dir_okay=False)],
    name: Annotated[str, typer.Option(help="The name of the image; default: tar:FILE.")] = "",
) -> None:
    """Make an image from a tar file."""
    images = _images()
    _make(f"importing {file}", lambda progress: images.import_tar(file, name, progress))


@app.command()
def rm(reference: Reference) -> None:
    """Remove an image that no sandbox uses."""
    images = _images()
    asyncio.run(images.remove(reference))
    freed = asyncio.run(images.gc())
    print(f"removed {reference}, {size(freed.size_bytes)} freed")


@app.command()
def verify(reference: Reference) -> None:
    """Check every file of an image against what was stored."""
    images = _images()

    async def check(progress: ProgressCallback) -> Image:
        await images.verify(reference, progress)
        return await images.get(reference)

    _make(f"verifying {reference}", check)


def _make(title: str, work: Callable[[ProgressCallback], Awaitable[Image]]) -> None:
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(title, total=None)

        async def run() -> Image:
            return await work(lambda step: _advance(bars, bar, title, step))

        image = asyncio.run(run())
    print(f"{image.reference}  {image.digest}  {size(image.size_bytes)}")


def _advance(bars: Progress, bar: TaskID, title: str, step: Step) -> None:
    detail = step.detail if len(step.detail) <= 48 else step.detail[:47] + "…"
    bars.update(bar, description=f"{title}: {step.stage} {detail}", completed=step.done_bytes, total=step.total_bytes)
