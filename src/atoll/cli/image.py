"""`atoll image`: the root file systems that sandboxes start from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from atoll.cli.stored_images import Reference, images_here, inspect, list_images, prune, pull_on_server, rm
from atoll.cli.target import server_url, size
from atoll.errors import SpecError
from atoll.images import Image, ProgressCallback, Recipe
from atoll.images import Progress as Step

T = TypeVar("T")

app = typer.Typer(help="Root file systems that sandboxes start from.", no_args_is_help=True, rich_markup_mode=None)
app.command("ls")(list_images)
app.command()(inspect)
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
    file: Annotated[Path, typer.Argument(help="An archive of an image.", exists=True, dir_okay=False)],
    name: Annotated[str, typer.Option(help="The name of the image; default: what the archive calls it.")] = "",
) -> None:
    """Make an image from an archive that `atoll image save`, `docker save` or skopeo wrote."""
    images = images_here()
    _make(f"loading {file}", lambda progress: images.load(file, name, progress))


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
    images = images_here()
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
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(title, total=None)

        async def run() -> T:
            return await work(lambda step: _advance(bars, bar, title, step))

        return asyncio.run(run())


def _advance(bars: Progress, bar: TaskID, title: str, step: Step) -> None:
    detail = step.detail if len(step.detail) <= 48 else step.detail[:47] + "…"
    bars.update(bar, description=f"{title}: {step.stage} {detail}", completed=step.done_bytes, total=step.total_bytes)
