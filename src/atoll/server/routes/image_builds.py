"""Builds of images from Dockerfiles: requested with a context, followed, cancelled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as PathParameter

from atoll.errors import SandboxError
from atoll.server.connections.streaming import EventStream, Happening
from atoll.server.context_uploads import CONTEXT, OPTIONS, receive
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope
from atoll.server.routes.openapi_parts import IdempotencyKey, Limit, PageId, event_stream, locate
from atoll.server.routes.paging import Place, page
from atoll.service.models.image_build import BuildState, ImageBuildInfo, ImageBuildPage

router = APIRouter(prefix="/images/builds", tags=["images"])
BuildId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{1,64}$", description="The id of the build.")]
_MAX_OFFSET = 1 << 53
_MAX_SKIPPED = 256 << 20
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        OPTIONS: {"$ref": "#/components/schemas/ImageBuildRequest"},
                        CONTEXT: {
                            "type": "string",
                            "format": "binary",
                            "description": "The context as a tar archive, compressed or not. Default: an empty one.",
                        },
                    },
                    "additionalProperties": False,
                },
                "encoding": {
                    OPTIONS: {"contentType": "application/json"},
                    CONTEXT: {"contentType": "application/x-tar"},
                },
            }
        },
    }
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"headers": {"Location": {"description": "The URL of the build.", "schema": {"type": "string"}}}},
    415: {"description": "The body is not multipart/form-data."},
}


@router.post(
    "",
    operation_id="build_image",
    summary="Build an image",
    status_code=202,
    openapi_extra=_FORM,
    responses=ACCEPTED,
)
async def build(
    caller: ManageScope,
    services: AppServices,
    request: Request,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> ImageBuildInfo:
    """Build an image from a Dockerfile. The body is a form with the part `options`, an `ImageBuildRequest` as JSON, and
    the part `context`, a tar archive. Answers as soon as the context is there; the build then waits for its turn. It
    goes on when the client is gone. `RUN` runs in sandboxes of the caller's account."""
    try:
        services.builds.check_room(caller)
    except SandboxError:
        await _skip(request)  # a client that is still sending would not read the answer
        raise
    async with contextlib.AsyncExitStack() as held:
        transfer = await held.enter_async_context(services.contexts.open())
        wanted = await receive(
            transfer,
            request.headers.get("content-type", ""),
            _body(request),
            max_bytes=services.settings.max_upload_bytes,
            timeout_s=services.settings.max_build_s,
        )
        made = await services.builds.begin(caller, wanted, transfer.tree, held.pop_all(), key=idempotency_key)
    locate(response, f"/images/builds/{made.id}")
    return made


@router.get("", operation_id="list_image_builds", summary="List builds of images")
async def list_them(
    caller: ReadScope,
    services: AppServices,
    state: Annotated[BuildState | None, Query(description="Only builds in this state.")] = None,
    page_id: PageId = None,
    limit: Limit = 100,
) -> ImageBuildPage:
    """Return the caller's builds, newest first, one page at a time. Administrators see those of all users."""
    found, more = page(services.builds.list(caller, state), _place, page_id, limit)
    return ImageBuildPage(items=found, next_page_id=more)


@router.get("/{build_id}", operation_id="get_image_build", summary="Get a build of an image")
async def get(caller: ReadScope, services: AppServices, build_id: BuildId) -> ImageBuildInfo:
    """Return the state of a build: which step it has come to, why it failed, or what was built."""
    return services.builds.get(caller, build_id)


@router.delete("/{build_id}", operation_id="cancel_image_build", summary="Cancel a build of an image", status_code=204)
async def cancel(caller: ManageScope, services: AppServices, build_id: BuildId) -> None:
    """End a build that waits or runs, and remove what it has made. Steps that are in the cache stay there. Has no
    effect on a build that has ended."""
    await services.builds.cancel(caller, build_id)


@router.get(
    "/{build_id}/logs",
    operation_id="follow_image_build",
    summary="Read the log of a build",
    response_class=EventStream,
    responses=event_stream(
        "Events: `plan`, `step`, `cached`, `output`, `done`, `progress`, `warning`, `failed`, `dropped`, each with the"
        " `offset` behind it; `heartbeat` while nothing happens, and at last `end` with the state and the build."
    ),
)
async def logs(
    caller: ReadScope,
    services: AppServices,
    request: Request,
    build_id: BuildId,
    offset: Annotated[int, Query(ge=0, le=_MAX_OFFSET, description="Where to begin, in bytes of the log.")] = 0,
    follow: Annotated[bool, Query(description="Whether to go on until the build has ended.")] = True,
    last: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=_MAX_OFFSET,
            description="The offset of the last event received, as browsers send it. Replaces `offset`.",
        ),
    ] = None,
) -> EventStream:
    """Send what happens in a build. After a lost connection, continue with the `offset` of the last event."""
    events = services.builds.log(caller, build_id, offset if last is None else last, follow=follow)

    async def happening() -> AsyncGenerator[Happening, None]:
        with services.metrics.stream("build"):
            async for event in events:
                yield event

    return EventStream(request, happening(), on_close=events.aclose)


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


async def _skip(request: Request) -> None:
    seen = 0
    async for piece in request.stream():
        seen += len(piece)
        if seen > _MAX_SKIPPED:
            return


def _place(build: ImageBuildInfo) -> Place:
    return -build.created_at.timestamp(), build.id
