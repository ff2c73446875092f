"""`atoll image`: the root file systems that sandboxes start from."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from atoll.cli.image_contents import bill_of_materials, contents_of, versions
from atoll.cli.image_progress import ImageBar
from atoll.cli.target import print_json, size
from atoll.errors import SpecError
from atoll.images import Image, Images, Kind, ProgressCallback, Recipe
from atoll.images.reference import ENVIRONMENTS
from atoll.settings import Settings

app = typer.Typer(help="Root file systems that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
Reference = Annotated[
    str,
    typer.Argument(
        help="host, an environment, debian:SUITE, a recipe, tar:FILE, docker:NAME or [REGISTRY/]NAME[:TAG]."
    ),
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
    for name in ENVIRONMENTS:
        if name not in built and name not in images.recipes.all():
            table.add_row(name, "", "", "environment, not built: `atoll image build` does, or the first use")
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
    name: Annotated[
        str,
        typer.Argument(help="code, computer, browser, debian:SUITE, a recipe's name, or a new name with --package."),
    ],
    suite: Annotated[str, typer.Option(help="The Debian suite of a new recipe.")] = "bookworm",
    package: Annotated[
        list[str] | None, typer.Option("--package", "-p", help="A package to install; makes a new recipe.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build an environment again that is there already or in the cache.")
    ] = False,
) -> None:
    """Build a ready-made environment, or an image from Debian packages."""
    if not package and ("/" in name or name == "." or Path(name).is_dir()):
        raise SpecError(f"{name!r} is a directory, which has a Dockerfile", hint=f"Run: atoll build {name}")
    images = _images()
    if not package and not no_cache and images.parse(name).kind is Kind.ENVIRONMENT:
        _make(f"building {name}", lambda progress: images.ensure(name, progress))
        return
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
def inspect(
    reference: Reference,
    sbom: Annotated[
        str, typer.Option("--sbom", metavar="FORM", help="Print a bill of materials: spdx or cyclonedx.")
    ] = "",
) -> None:
    """Show an image as JSON: its digest, its layers and configuration, and the versions of what is in it."""
    print_json(asyncio.run(_bill(reference, sbom) if sbom else _details(reference)))


async def _bill(reference: str, form: str) -> dict[str, Any]:
    images = _images()
    return await bill_of_materials(images, await images.get(reference), form)


async def _details(reference: str) -> dict[str, Any]:
    images = _images()
    image = await images.get(reference)
    if not image.layers:
        return {"name": "host", "notes": ["this machine's own /usr"]}
    facts = {"name": image.reference, "kind": image.kind, "digest": image.digest, "size_bytes": image.size_bytes}
    config = {"config": dataclasses.asdict(image.config), "notes": list(image.notes)}
    return facts | config | {"versions": versions(await contents_of(images, image))}


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
    async def run() -> Image:
        return await work(bar.advance)

    with ImageBar(title) as bar:
        image = asyncio.run(run())
    print(f"{image.reference}  {image.digest}  {size(image.size_bytes)}")
