"""A build that a server carries out: the context is sent, the log is followed, and the result is as for a build here.

The log is read on after a lost connection, also through a restart of the server. When the caller is cancelled, so is
the build on the server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll import workers
from atoll.builds.context_archive import pieces
from atoll.builds.request import BuildEvent, BuildRequest, BuiltImage, OnBuildEvent
from atoll.cancellation import ended, finish
from atoll.engines.remote.rest_client import Server, error_of, seconds_since_1970
from atoll.errors import BuildError, EngineError, EngineUnavailableError, SandboxError
from atoll.images import Image, ImageConfig, Kind
from atoll.model import SandboxSpec

_UPLOAD_S = 3600.0
_UNDO_S = 60.0
_PATIENCE_S = 60.0
_PAUSE_S = 0.5
_KINDS = ("plan", "step", "cached", "output", "done", "failed", "progress", "warning")
_TUPLES = ("entrypoint", "cmd", "exposed_ports", "volumes", "shell", "history")


async def build_on_server(server: Server, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
    """Build an image on a server. Raises what a build on this machine raises; BuildError if a step fails."""
    began = time.monotonic()
    sending = _Sending(request)
    making = asyncio.create_task(_post(server, sending))
    try:
        build = await asyncio.shield(making)
    except asyncio.CancelledError:
        await finish(_give_up(server, making, sending))
        raise
    for path in sending.left_out:
        on_event(BuildEvent("warning", f"'{path}' in the context is left out: it is a device, pipe or socket"))
    place = f"/images/builds/{build['id']}"
    try:
        over = await _follow(server, place, on_event)
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxError, TimeoutError):
            await finish(_cancel(server, place))
        raise
    return _result(over, time.monotonic() - began)


def options_of(request: BuildRequest) -> dict[str, Any]:
    """Return the options of a build as a server reads them."""
    plain = SandboxSpec(limits=request.limits, network=request.network).model_dump(mode="json", exclude_none=True)
    options: dict[str, Any] = {
        "name": request.name,
        "args": dict(request.args),
        "secrets": {name: base64.b64encode(value).decode() for name, value in request.secrets.items()},
        "labels": dict(request.labels),
        "target": request.target,
        "no_cache": request.no_cache,
        "limits": plain["limits"],
        "timeout_s": request.timeout_s,
    }
    if request.network != "none":
        options["network"] = plain["network"]
    if isinstance(request.dockerfile, bytes):
        options["dockerfile_text"] = request.dockerfile.decode(errors="replace")
    elif request.dockerfile is not None:
        options["dockerfile"] = request.dockerfile
    return options


def image_of(info: Mapping[str, Any]) -> Image:
    """Return an image of a server, whose files are not on this machine."""
    config = {name: info[name] for name in ImageConfig.__dataclass_fields__ if name in info}
    config |= {"cmd": info.get("command", ())}
    config |= {name: tuple(config[name]) for name in _TUPLES if name in config}
    return Image(
        reference=str(info["name"]),
        kind=Kind.OCI,
        digest=str(info["digest"]),
        config=ImageConfig(**config),
        size_bytes=int(info["size_bytes"]),
        created_at=seconds_since_1970(info["created_at"]),
        notes=tuple(map(str, info.get("notes") or ())),
    )


class _Sending:
    """The form with the options and the context, which is read while it is sent."""

    def __init__(self, request: BuildRequest) -> None:
        self.boundary = f"atoll-{secrets.token_hex(16)}"
        self.is_sent = False
        self._options = json.dumps(options_of(request)).encode("utf-8", "surrogateescape")
        dockerfile = request.dockerfile if isinstance(request.dockerfile, str) else "Dockerfile"
        self.left_out: list[str] = []
        self._pieces: Iterator[bytes] = pieces(Path(request.context), dockerfile, self.left_out)

    async def body(self) -> AsyncIterator[bytes]:
        yield self._head("options", "application/json") + self._options
        yield b"\r\n" + self._head("context", "application/x-tar")
        while piece := await workers.run(workers.TRANSFER, next, self._pieces, b""):
            yield piece
        self.is_sent = True
        yield f"\r\n--{self.boundary}--\r\n".encode()

    def _head(self, name: str, kind: str) -> bytes:
        disposition = f'Content-Disposition: form-data; name="{name}"; filename="{name}"'
        return f"--{self.boundary}\r\n{disposition}\r\nContent-Type: {kind}\r\n\r\n".encode()


async def _post(server: Server, sending: _Sending) -> dict[str, Any]:
    made = await server.call(
        "POST",
        "/images/builds",
        safe=False,
        timeout_s=_UPLOAD_S,
        content_type=f"multipart/form-data; boundary={sending.boundary}",
        content=sending.body(),
    )
    if not isinstance(made, dict):
        raise EngineError("the server's answer is invalid")
    return made


async def _give_up(server: Server, making: asyncio.Task[dict[str, Any]], sending: _Sending) -> None:
    """Break an upload off. If it had arrived as a whole, wait for the build that it began, and cancel that."""
    if not sending.is_sent:
        making.cancel()
        await ended(making)
    await asyncio.wait({making}, timeout=_UNDO_S)
    if making.done() and not making.cancelled() and making.exception() is None:
        with contextlib.suppress(SandboxError, TimeoutError):
            await _cancel(server, f"/images/builds/{making.result()['id']}")
    making.cancel()


async def _cancel(server: Server, place: str) -> None:
    async with asyncio.timeout(_UNDO_S):
        await server.call("DELETE", place, timeout_s=_UNDO_S)


async def _follow(server: Server, place: str, on_event: OnBuildEvent) -> Mapping[str, Any]:
    """Report the events of a build until it has ended, and return what the server then says about it."""
    offset, broken_at = 0, None
    while True:
        try:
            async with contextlib.aclosing(server.lines(f"{place}/logs", {"offset": str(offset)})) as lines:
                async for event in lines:
                    broken_at, offset = None, int(event.get("offset", offset))
                    if event.get("type") == "end":
                        return dict(event["build"])
                    _report(event, on_event)
        except EngineUnavailableError as error:
            broken_at = broken_at or time.monotonic()
            if time.monotonic() > broken_at + _PATIENCE_S:
                raise error
        await asyncio.sleep(_PAUSE_S)


def _report(event: Mapping[str, Any], on_event: OnBuildEvent) -> None:
    kind = "warning" if event.get("type") == "dropped" else event.get("type")
    if kind not in _KINDS:
        return
    on_event(
        BuildEvent(
            kind=kind,  # type: ignore[arg-type]
            text=str(event.get("text", "")),
            stage=str(event.get("stage", "")),
            step=int(event.get("step") or 0),
            steps=int(event.get("steps") or 0),
            place=str(event.get("place", "")),
            channel=int(event.get("channel") or 1),
            seconds=float(event.get("seconds") or 0.0),
            time=float(event.get("time") or time.time()),
        )
    )


def _result(build: Mapping[str, Any], seconds: float) -> BuiltImage:
    if build["state"] == "done":
        return BuiltImage(image_of(build["image"]), build["steps"], build["cached_steps"], seconds)
    if build["state"] == "cancelled":
        raise BuildError(f"build {build['id']} was cancelled on the server")
    raise error_of(422, json.dumps(build.get("error") or {}).encode())
