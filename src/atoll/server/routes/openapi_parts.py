"""Parameters, bodies and answers that several routes share."""

from __future__ import annotations

import urllib.parse
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Response
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from atoll.server.admission import admission_of
from atoll.server.connections.streaming import NDJSON, SSE
from atoll.server.middleware.auth import services_of

BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BINARY_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": BINARY}}


async def _resolved(
    connection: HTTPConnection,
    sandbox_id: Annotated[
        str,
        Path(
            pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$",
            description="The id of the sandbox, its name, or the id of its task.",
        ),
    ],
) -> str:
    """Return the id of the sandbox that the caller means. Routes that identify their caller only later accept ids
    only."""
    known = admission_of(connection.scope)
    return sandbox_id if known is None else await services_of(connection).sandboxes.resolve(known.caller, sandbox_id)


SandboxId = Annotated[str, Depends(_resolved)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Any text. Requests repeated with the same key are carried out once and answered alike.",
    ),
]
PREFIX = "/api/v1"
_FIRST, _LAST = -62_135_596_800.0, 253_402_300_799.0
PageId = Annotated[
    str | None, Query(max_length=1024, description="The `next_page_id` of the previous page. Default: the first page.")
]
Limit = Annotated[int, Query(gt=0, le=100, description="The most items to return.")]


CREATED: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The URL of what was made.", "schema": {"type": "string"}}}}
}


def moment(seconds: float) -> datetime:
    """Return a time in seconds since 1970 as answers show it: in UTC, as ISO 8601. Times outside of the years that this
    can express, which a file may have, become the nearest one."""
    return datetime.fromtimestamp(min(max(seconds, _FIRST), _LAST), UTC)


def locate(response: Response, path: str) -> None:
    """Say in the answer where what was made can be found. `path` is below the prefix of all routes."""
    response.headers["Location"] = f"{PREFIX}{urllib.parse.quote(path)}"


class Success(BaseModel):
    """The request was carried out. Only where OpenHands expects this answer; others that return nothing have status
    204."""

    success: bool = True
    """Always true. Failures are answered with an error status."""


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a body that a route reads by itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Describe the answer of a route that sends events as they happen."""
    content = {NDJSON: {"schema": {"type": "string"}}, SSE: {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
