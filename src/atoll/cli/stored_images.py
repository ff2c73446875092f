"""What `atoll image` shows of stored images, and how it removes them: here, or on a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from atoll.cli.target import (
    JsonOption,
    age,
    ask_server,
    iso_time,
    list_from_server,
    open_server,
    print_json,
    server_url,
    show,
    size,
)
from atoll.engines.contract import Building
from atoll.errors import EngineUnavailableError, ImageError
from atoll.images import Image, Images, ImageUsage
from atoll.images.access import OPERATOR, pulling_with
from atoll.images.reference import ENVIRONMENTS
from atoll.settings import Settings

Reference = Annotated[
    str,
    typer.Argument(
        help="host, an environment, debian:SUITE, a recipe, tar:FILE, docker:NAME or [REGISTRY/]NAME[:TAG]."
    ),
]
OwnerOption = Annotated[
    str | None, typer.Option("--owner", metavar="USER", help="The user of a server whose image is meant.")
]
_DAY_S = 86400.0
_POLL_S = 0.5
_SHOWN_USERS = 3


def images_here(*, plain_http: tuple[str, ...] = (), mirrors: tuple[str, ...] = ()) -> Images:
    settings = Settings.load()
    return Images(
        settings.data_dir,
        plain_http_registries=plain_http,
        registry_mirrors=mirrors or settings.registry_mirrors,
        blob_cache_bytes=settings.blob_cache_bytes,
    )


def list_images(as_json: JsonOption = False) -> None:
    """List the images that are stored here or on the server, and the recipes that can be built."""
    found = list_from_server("/images") if server_url() is not None else _here()
    if as_json:
        print_json(found)
        return
    rows = [_row(each) for each in found]
    if server_url() is None:
        rows.insert(0, _row_of_recipe("host", "this machine's own /usr"))
        rows += _recipes({each["name"] for each in found})
    show(rows, False)


def show_on_server(reference: str, owner: str | None) -> None:
    """Print what the server knows about an image."""
    params = {"name": reference} | ({"owner": owner} if owner is not None else {})
    print_json(ask_server("GET", "/images/inspect", params=params))


async def details(images: Images, reference: str, owner: str) -> tuple[Image, dict[str, Any]]:
    """Return an image that is stored here, and what is shown of it."""
    with pulling_with(dataclasses.replace(OPERATOR, owner=owner)):
        image = await images.get(reference)
    if not image.layers:
        return image, {"name": "host", "notes": ["this machine's own /usr"]}
    usage = next(each for each in await images.usage() if _same(each.image, image))
    layers = [{"digest": each.digest, "size_bytes": each.size_bytes} for each in await images.layer_infos(image)]
    config = dict(json.loads(json.dumps(dataclasses.asdict(image.config))))
    rest = {"kind": image.kind, "config": config, "layers": layers[::-1], "source": image.source}
    return image, _shown(usage) | rest | {"notes": list(image.notes)}


def rm(
    references: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="The names of images.")],
    owner: OwnerOption = None,
) -> None:
    """Remove images that no sandbox uses."""
    if server_url() is not None:
        for reference in references:
            params = {"name": reference} | ({"owner": owner} if owner is not None else {})
            ask_server("DELETE", "/images", params=params)
            print(f"removed {reference}")
        return
    images = images_here()
    for reference in references:
        with pulling_with(dataclasses.replace(OPERATOR, owner=owner or "")):
            freed = asyncio.run(_removed(images, reference))
        print(f"removed {reference}, {size(freed)} freed")


def prune(
    all: Annotated[
        bool, typer.Option("--all", help="Remove images that have a name as well, if no sandbox uses them.")
    ] = False,
    older: Annotated[
        float, typer.Option("--older", metavar="DAYS", min=0, help="Remove only what is at least so many days old.")
    ] = 0,
) -> None:
    """Remove what nobody uses: images without a name, layers kept for later pulls, steps of builds."""
    if server_url() is not None:
        done = ask_server("POST", "/images/prune", json={"all": all, "older_days": older})
        names, freed = done["names"], done["freed_bytes"]
    else:
        names, freed = asyncio.run(_pruned(all, older * _DAY_S))
    for name in names:
        print(f"removed {name}")
    print(f"{size(freed)} freed")


def pull_on_server(reference: str) -> None:
    """Let the server pull an image, and wait until it is there. Raises ImageError if the server cannot."""

    async def work() -> dict[str, Any]:
        async with open_server() as server:
            found = await server.call("POST", "/images/pull", json={"name": reference})
            while found["status"] == "pulling":
                await asyncio.sleep(_POLL_S)
                found = await server.call("GET", "/images/inspect", params={"name": found["name"]})
            return dict(found)

    from rich.console import Console

    with Console(stderr=True).status(f"the server is pulling {reference}"):
        found = asyncio.run(work())
    if found["status"] == "failed" or found["detail"]:
        raise ImageError(found["detail"] or f"the server could not pull {reference}")
    print(f"{found['name']}  {found['digest']}  {size(found['size_bytes'])}")


# --- inside ---------------------------------------------------------------------------------------------------------


def _here() -> list[dict[str, Any]]:
    return [_shown(each) for each in asyncio.run(images_here().usage())]


def _shown(found: ImageUsage) -> dict[str, Any]:
    """Return an image in the form in which a server shows it."""
    image = found.image
    return {
        "name": image.reference,
        "owner_id": image.owner or None,
        "status": "ready",
        "digest": image.digest,
        "created_at": iso_time(image.created_at),
        "size_bytes": image.size_bytes,
        "own_bytes": found.own_bytes,
        "shared_bytes": found.shared_bytes,
        "private": image.private,
        "users": list(found.users),
    }


def _row(found: dict[str, Any]) -> dict[str, object]:
    users = found["users"]
    more = f" and {len(users) - _SHOWN_USERS} more" if len(users) > _SHOWN_USERS else ""
    is_ready = found["status"] == "ready"
    made = datetime.fromisoformat(found["created_at"]).astimezone(UTC).timestamp() if found.get("created_at") else None
    return {
        "name": found["name"],
        "digest": (found["digest"] or "")[:19],
        "size": size(found["size_bytes"]) if is_ready else found["status"],
        "own": size(found["own_bytes"]) if is_ready else "",
        "shared": size(found["shared_bytes"]) if is_ready else "",
        "age": age(made) if made is not None else "",
        "users": ", ".join(users[:_SHOWN_USERS]) + more,
        "owner": found["owner_id"] or "",
    }


def _row_of_recipe(name: str, what: str) -> dict[str, object]:
    return {"name": name, "digest": "", "size": "", "own": "", "shared": "", "age": "", "users": what, "owner": ""}


def _recipes(there: set[str]) -> list[dict[str, object]]:
    """Return rows for what is not here but can be built."""
    recipes = images_here().recipes.all()
    environments = [
        _row_of_recipe(name, "environment, not built: `atoll image build` does, or the first use")
        for name in ENVIRONMENTS
        if name not in there and name not in recipes
    ]
    return environments + [
        _row_of_recipe(name, f"recipe, not built: {recipe.suite} with {len(recipe.packages)} packages")
        for name, recipe in recipes.items()
        if name not in there and f"recipe:{name}" not in there
    ]


def _same(one: Image, other: Image) -> bool:
    return (one.reference, one.owner) == (other.reference, other.owner)


async def _removed(images: Images, reference: str) -> int:
    """Remove an image. Return how many bytes this freed."""
    image = await images.get(reference)
    found = [each for each in await images.usage() if _same(each.image, image)]
    await images.remove(reference)
    return (await images.gc()).size_bytes + sum(each.own_bytes for each in found)


async def _pruned(all: bool, unused_s: float) -> tuple[list[str], int]:
    done = await images_here().prune(all=all, unused_s=unused_s)
    return list(done.references), done.freed_bytes + await _pruned_steps(unused_s)


async def _pruned_steps(unused_s: float) -> int:
    """Remove the steps that builds have kept, if there is an engine here that keeps any."""
    from atoll.engines import registry

    try:
        engine = registry.get("native", Settings.load())
    except EngineUnavailableError:
        return 0
    try:
        return await engine.prune_steps(unused_s=unused_s) if isinstance(engine, Building) else 0
    finally:
        await engine.aclose()
