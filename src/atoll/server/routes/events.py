"""Events of sandboxes: polled from a cursor, or streamed as they happen."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel

from atoll.manager import Event, Operation
from atoll.model import Cause, State
from atoll.server.connections.streaming import EventStream, Happening
from atoll.server.middleware.auth import AppServices, ReadScope
from atoll.server.routes.openapi_parts import event_stream

router = APIRouter(prefix="/events", tags=["events"])
Number = Annotated[
    int | None,
    Query(ge=0, le=1 << 53, description="Return events with a higher number than this. Default: from the first."),
]
SandboxQuery = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Only events of this sandbox.")
]


EventKind = Literal["state", "port", "health", "callback"]
KindQuery = Annotated[EventKind | None, Query(description="Only events of this kind.")]


class EventInfo(BaseModel):
    """Something that happened to a sandbox."""

    number: int
    """The number of the event. Later events have higher numbers."""
    at: datetime
    """When it happened."""
    sandbox_id: str
    """The sandbox it happened to."""
    before: State
    """The state of the sandbox before."""
    after: State
    """The state of the sandbox afterwards."""
    act: Operation | None
    """The operation that caused the event."""
    cause: Cause | None
    """Why the sandbox ended."""
    reason: str
    """What happened, in words."""
    kind: EventKind = "state"
    """`state`: the sandbox changed its state, or a note about it. `port`: something began to listen on a port.
    `health`: the result of a health check. `callback`: a message that a program inside posted."""
    data: dict[str, Any] | None = None
    """Details of the kinds `port` (the port and its process), `health` (the status) and `callback` (the message)."""


class EventPage(BaseModel):
    """One page of events."""

    items: list[EventInfo]
    """The events of this page, oldest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null if there was no event after the previous page."""
    next_after: int
    """The `after` of the next page. Unchanged if there was no event."""
    latest: int
    """The number of the newest event of anybody's sandboxes. All later events are new."""


@router.get("", operation_id="list_events", summary="List events")
async def events(
    caller: ReadScope,
    services: AppServices,
    after: Number = None,
    page_id: Annotated[
        str | None,
        Query(pattern=r"^[0-9]{1,16}$", description="The `next_page_id` of the previous page, in place of `after`."),
    ] = None,
    sandbox_id: SandboxQuery = None,
    kind: KindQuery = None,
    limit: Annotated[int, Query(gt=0, le=1000, description="The most events to return.")] = 100,
) -> EventPage:
    """Return the events of the caller's sandboxes, oldest first, starting after a number. To continue, pass
    `next_page_id` as `page_id`; to wait for new ones, pass `next_after` as `after`."""
    if page_id is not None and after is not None:
        raise ValueError("give either page_id or after, not both")
    start = int(page_id) if page_id is not None else after or 0
    found, following = await services.sandboxes.events(
        caller, after=start, sandbox_id=sandbox_id, limit=limit, kind=kind
    )
    latest = await services.manager.latest_event()
    more = str(following) if following != start else None
    items = [_info(event) for event in found]
    return EventPage(items=items, next_page_id=more, next_after=following, latest=latest)


@router.get(
    "/stream",
    operation_id="stream_events",
    summary="Stream events",
    response_class=EventStream,
    responses=event_stream("Events of type `event`, and `heartbeat` while nothing happens."),
)
async def stream(
    caller: ReadScope,
    services: AppServices,
    request: Request,
    after: Annotated[
        int | None,
        Query(ge=0, le=1 << 53, description="Send events with a higher number than this. Default: only new ones."),
    ] = None,
    sandbox_id: SandboxQuery = None,
    kind: KindQuery = None,
    last: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=1 << 53,
            description="The number of the last event received, as browsers send it. Replaces `after`.",
        ),
    ] = None,
) -> EventStream:
    """Send the events of the caller's sandboxes as they happen. A browser that reconnects continues where it
    stopped."""
    start = last if last is not None else after
    if start is None:
        start = await services.manager.latest_event()
    if sandbox_id is not None:
        await services.sandboxes.events(caller, after=start, sandbox_id=sandbox_id, limit=1)

    async def happening() -> AsyncGenerator[Happening, None]:
        position = start
        with services.metrics.stream("events"):
            while True:
                upcoming = services.happened.next
                found, position = await services.sandboxes.events(
                    caller, after=position, sandbox_id=sandbox_id, kind=kind
                )
                for event in found:
                    yield {**_info(event).model_dump(mode="json"), "type": "event", "id": event.number}
                if not found:
                    await upcoming.wait()

    return EventStream(request, happening())


def _info(event: Event) -> EventInfo:
    return EventInfo(
        number=event.number,
        at=datetime.fromtimestamp(event.at, UTC),
        sandbox_id=event.sandbox_id,
        before=event.before,
        after=event.after,
        act=event.act,
        cause=event.cause,
        reason=event.reason,
        kind=event.kind,  # type: ignore[arg-type]
        data=json.loads(event.data) if event.data else None,
    )
