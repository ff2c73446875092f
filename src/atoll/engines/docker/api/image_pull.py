"""The image of a sandbox, which is pulled from its registry if the Docker engine does not have it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from atoll import workers
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.errors import EngineError, ImageError, ImageNotFoundError, SpecError
from atoll.images import access
from atoll.model import ImageDefaults, ImageProgress

PULL_S = 1800.0
_STALL_S = 60.0
"""A registry that has sent nothing for this long is given up."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_ABSENT = ("not found", "does not exist", "manifest unknown", "no such image", "pull access denied")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Image:
    """The properties of an image that Atoll needs."""

    id: str
    architecture: str
    env: dict[str, str]
    size_bytes: int = 0
    volumes: tuple[str, ...] = ()
    """Directories that the Docker engine keeps outside of the container's own disk."""
    defaults: ImageDefaults = field(default_factory=ImageDefaults)
    """What else the image says about containers made from it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull has come."""

    image: str
    status: str
    layer: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[Progress], None]


def summed(on_progress: Callable[[ImageProgress], None]) -> OnProgress:
    """Add up the progress of all layers. The Docker engine reports each layer and each stage separately."""
    layers: dict[str, tuple[int, int]] = {}

    def step(told: Progress) -> None:
        is_download = told.status == "Downloading"
        if is_download and told.total_bytes:
            layers[told.layer] = (told.done_bytes, told.total_bytes)
        elif told.layer in layers:  # downloaded, or being extracted after its download
            layers[told.layer] = (layers[told.layer][1], layers[told.layer][1])
        done, total = (sum(sizes) for sizes in zip(*layers.values(), strict=True)) if layers else (0, 0)
        stage = "extract" if told.status == "Extracting" else "pull"
        on_progress(ImageProgress(stage, f"{told.status} {told.layer}".strip(), done, total or None))

    return step


async def ensure(http: Http, name: str, on_progress: OnProgress | None = None) -> Image:
    """Return the image, pulled if it is missing. Cancelling stops the pull."""
    check_name(name)
    found = await find(http, name)
    if found is None:
        _log.info("image %s is missing, pulling it", name)
        await pull(http, name, on_progress)
        found = await find(http, name)
        if found is None:
            raise ImageError(f"image '{name}' was pulled but cannot be found", hint="It may be for another platform.")
    return found


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or ".." in name or "//" in name:
        raise SpecError(f"{name[:80]!r} is not an image", hint="Write [REGISTRY/]NAME[:TAG] or NAME@sha256:DIGEST.")


async def find(http: Http, name: str) -> Image | None:
    try:
        answer = await http.call("GET", f"/images/{quote(name, safe='/:@')}/json")
    except RefusedError as error:
        if error.status == 404:
            return None
        if error.status == 400:
            raise SpecError(f"'{name}' is not an image: {error.message}") from error
        raise EngineError(f"the Docker engine cannot look for image '{name}': {error.message}") from error
    config = answer.get("Config") or {}
    pairs = (str(entry).partition("=") for entry in config.get("Env") or ())
    return Image(
        str(answer["Id"]),
        str(answer.get("Architecture", "")),
        {key: value for key, _, value in pairs},
        int(answer.get("Size") or 0),
        tuple(sorted(config.get("Volumes") or ())),
        ImageDefaults(
            digest=str(answer["Id"]),
            user=str(config.get("User") or ""),
            work_dir=str(config.get("WorkingDir") or ""),
            entrypoint=_words(config.get("Entrypoint")),
            cmd=_words(config.get("Cmd")),
            exposed_ports=tuple(sorted(map(str, config.get("ExposedPorts") or ()))),
            labels={str(name): str(value) for name, value in (config.get("Labels") or {}).items()},
        ),
    )


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


async def pull(http: Http, name: str, on_progress: OnProgress | None = None) -> None:
    """Pull an image. Raises ImageNotFoundError with the reason, also when the registry cannot be reached."""
    repository, tag = _split(name)
    query = {"fromImage": repository, "tag": tag} if tag else {"fromImage": repository}
    asker = access.current()
    headers = await workers.run(workers.IMAGE, _credentials, repository, asker)
    try:
        lines = http.lines("POST", "/images/create", query=query, headers=headers, timeout_s=PULL_S)
        async with aclosing(lines) as told:
            async for line in _never_silent(name, told):
                if "error" in line:
                    raise _failure(name, "" if asker.guarded else str(line["error"]))
                if on_progress is not None:
                    on_progress(_progress(name, line))
    except RefusedError as error:
        raise _failure(name, "" if asker.guarded else error.message) from error


async def _never_silent(name: str, lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    while True:
        try:
            async with asyncio.timeout(_STALL_S):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _failure(name, f"the registry sent nothing for {_STALL_S:g} s") from None
        yield line


def _failure(name: str, said: str) -> ImageError:
    if not said:
        return ImageNotFoundError(f"image '{name}' cannot be pulled", hint="Check its name, and that it is public.")
    if any(word in said.lower() for word in _ABSENT):
        return ImageNotFoundError(
            f"there is no image '{name}': {said}",
            hint="Check its name; 'docker login' if it is private, 'docker build' or 'docker load' if it is your own.",
        )
    return ImageNotFoundError(
        f"image '{name}' is not on this machine and its registry cannot be reached: {said}",
        hint=f"Pull it while there is a network ('docker pull {name}'), or load it from a file ('docker load').",
    )


def _progress(name: str, line: dict[str, Any]) -> Progress:
    detail = line.get("progressDetail") or {}
    return Progress(
        image=name,
        status=str(line.get("status", "")),
        layer=str(line.get("id", "")),
        done_bytes=int(detail.get("current") or 0),
        total_bytes=int(detail.get("total") or 0),
    )


def _split(name: str) -> tuple[str, str]:
    """Split a name into repository and tag. The default tag is `latest`, as the Docker engine would otherwise pull all
    tags."""
    if "@" in name:
        return name, ""
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        return name, "latest"
    return repository, tag


def _credentials(repository: str, asker: access.Access) -> dict[str, str]:
    """Return the headers with the credentials for a registry.

    The Docker engine makes the connection, so Atoll can only check the addresses that the registry's name has now.
    """
    first, slash, _ = repository.partition("/")
    registry = first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"
    # Docker Hub is public, and often reached through a mirror that only the engine knows
    if asker.guarded and registry != "docker.io":
        host, _, port = registry.rpartition(":") if ":" in registry else (registry, "", "443")
        host = host.strip("[]").lower()
        asker.check(host, int(port or 443), asker.resolve(host, int(port or 443)))
    found = asker.credentials(registry)
    if found is None:
        return {}
    entry = {"username": found.username, "password": found.password, "serveraddress": registry}
    if found.identity_token:
        entry = {"identitytoken": found.identity_token, "serveraddress": registry}
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(entry).encode()).decode()}
