"""What happened: polled from a cursor, or as it happens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel

from atoll.manager import Act, Event
from atoll.model import Cause, State
from atoll.server.auth import Reader, Services_
from atoll.server.streaming import NDJSON, SSE, EventStream, Happening

router = APIRouter(prefix="/events", tags=["events"])
Number = Annotated[int, Query(ge=0, le=1 << 53)]
SandboxQuery = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


EventKind = Literal["state", "port", "health", "callback"]
KindQuery = Annotated[EventKind | None, Query(description="Only events of this kind.")]


class EventInfo(BaseModel):
    """A change of a sandbox. Ask for what comes `after` its number."""

    number: int
    at: datetime
    sandbox_id: str
    before: State
    after: State
    act: Act | None
    cause: Cause | None
    reason: str
    kind: EventKind = "state"
    """`state`: its state changed, or a note about it. `port`: something listens on a port. `health`: what its health
    check found. `callback`: a message that a program inside posted."""
    data: dict[str, Any] | None = None
    """Of the other kinds: the port and its process, the status, or the message."""


class EventPage(BaseModel):
    items: list[EventInfo]
    next_after: int
    """Where to go on; the same as before if nothing happened."""
    latest: int
    """The number of the newest event that there is, of anybody: from here on, all are new."""


@router.get("", operation_id="list_events")
async def events(
    caller: Reader,
    services: Services_,
    after: Number = 0,
    sandbox_id: SandboxQuery = None,
    kind: KindQuery = None,
    limit: Annotated[int, Query(gt=0, le=1000)] = 100,
) -> EventPage:
    """The caller's events, oldest first."""
    found, following = await services.sandboxes.events(
        caller, after=after, sandbox_id=sandbox_id, limit=limit, kind=kind
    )
    latest = await services.manager.latest_event()
    return EventPage(items=[_info(event) for event in found], next_after=following, latest=latest)


@router.get(
    "/stream",
    operation_id="stream_events",
    response_class=EventStream,
    responses={
        200: {
            "description": "One event after another.",
            "content": {NDJSON: {"schema": {"type": "string"}}, SSE: {"schema": {"type": "string"}}},
        }
    },
)
async def stream(
    caller: Reader,
    services: Services_,
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=1 << 53, description="Default: from now on.")] = None,
    sandbox_id: SandboxQuery = None,
    kind: KindQuery = None,
    last: Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=1 << 53)] = None,
) -> EventStream:
    """As they happen. A browser that reconnects goes on where it was."""
    start = last if last is not None else after
    if start is None:
        start = await services.manager.latest_event()
    if sandbox_id is not None:
        await services.sandboxes.events(caller, after=start, sandbox_id=sandbox_id, limit=1)

    async def happening() -> AsyncGenerator[Happening, None]:
        position = start
        with services.figures.stream("events"):
            while True:
                upcoming = services.bell.next
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
