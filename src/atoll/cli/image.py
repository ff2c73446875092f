"""`atoll image`: the root file systems that sandboxes start from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from atoll.cli.image_contents import bill_of_materials, contents_of, versions
from atoll.cli.image_progress import ImageBar
from atoll.cli.stored_images import (
    OwnerOption,
    Reference,
    details,
    images_here,
    list_images,
    prune,
    pull_on_server,
    rm,
    show_on_server,
)
from atoll.cli.target import print_json, server_url, size
from atoll.errors import SpecError, UnsupportedError
from atoll.images import Image, Kind, ProgressCallback, Recipe

T = TypeVar("T")

app = typer.Typer(help="Root file systems that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
app.command("ls")(list_images)
app.command()(rm)
app.command()(prune)
PlainHttpOption = Annotated[list[str] | None, typer.Option(help="Allow a registry without TLS.")]


@app.command()
def pull(
    reference: Reference,
    plain_http: PlainHttpOption = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(help="Ask this mirror first: HOST, http://HOST:PORT or REGISTRY=HOST; may be repeated."),
    ] = None,
) -> None:
    """Fetch an image from a registry, or from the local Docker engine, as it is now."""
    if server_url() is not None:
        pull_on_server(reference)
        return
    images = images_here(plain_http=tuple(plain_http or ()), mirrors=tuple(mirror or ()))
    _make(f"pulling {reference}", lambda progress: images.pull(reference, progress))


@app.command()
def push(
    reference: Reference,
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="The name there, [REGISTRY/]NAME[:TAG]; default: its name here.")
    ] = "",
    plain_http: PlainHttpOption = None,
) -> None:
    """Send an image to a registry. Layers that the registry has are not sent again."""
    images = images_here(plain_http=tuple(plain_http or ()))
    pushed = _with_bar(f"pushing {reference}", lambda progress: images.push(reference, target, progress))
    print(f"{pushed.reference}  {pushed.digest}  {size(pushed.sent_bytes)} sent")


@app.command()
def save(
    reference: Reference,
    oci: Annotated[Path, typer.Option(metavar="FILE", help="The archive to write.")],
    name: Annotated[str, typer.Option(help="What the archive calls the image; default: its name here.")] = "",
) -> None:
    """Write an image to an archive that `atoll image load`, `docker load` and skopeo read."""
    images = images_here()
    written = _with_bar(f"saving {reference}", lambda progress: images.save(reference, oci, progress, name=name))
    print(f"{oci}  {size(written)}")


@app.command()
def load(
    file: Annotated[Path, typer.Argument(help="An archive of an image.")],
    name: Annotated[str, typer.Option(help="The name of the image; default: what the archive calls it.")] = "",
) -> None:
    """Make an image from an archive that `atoll image save`, `docker save` or skopeo wrote."""
    images = images_here()
    _make(f"loading {file}", lambda progress: images.load(file, name, progress))


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
    images = images_here()
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
    images = images_here()
    _make(f"importing {file}", lambda progress: images.import_tar(file, name, progress))


@app.command()
def inspect(
    reference: Reference,
    sbom: Annotated[
        str, typer.Option("--sbom", metavar="FORM", help="Print a bill of materials: spdx or cyclonedx.")
    ] = "",
    owner: OwnerOption = None,
) -> None:
    """Show an image as JSON: its digest, its layers and configuration, and the versions of what is in it."""
    if server_url() is None:
        print_json(asyncio.run(_bill(reference, sbom) if sbom else _details(reference, owner or "")))
    elif sbom:
        raise UnsupportedError("a server makes no bills of materials", hint="Ask on the server's machine.")
    else:
        show_on_server(reference, owner)


async def _bill(reference: str, form: str) -> dict[str, Any]:
    images = images_here()
    return await bill_of_materials(images, await images.get(reference), form)


async def _details(reference: str, owner: str) -> dict[str, Any]:
    images = images_here()
    image, shown = await details(images, reference, owner)
    return shown | ({"versions": versions(await contents_of(images, image))} if image.layers else {})


@app.command()
def verify(reference: Reference) -> None:
    """Check every file of an image against what was stored."""
    images = images_here()

    async def check(progress: ProgressCallback) -> Image:
        await images.verify(reference, progress)
        return await images.get(reference)

    _make(f"verifying {reference}", check)


def _make(title: str, work: Callable[[ProgressCallback], Awaitable[Image]]) -> None:
    image = _with_bar(title, work)
    print(f"{image.reference}  {image.digest}  {size(image.size_bytes)}")


def _with_bar(title: str, work: Callable[[ProgressCallback], Awaitable[T]]) -> T:
    async def run() -> T:
        return await work(bar.advance)

    with ImageBar(title) as bar:
        return asyncio.run(run())
