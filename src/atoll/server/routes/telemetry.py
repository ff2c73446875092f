"""Telemetry of programs inside sandboxes, as OpenTelemetry's SDKs export it: OTLP over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from atoll import workers
from atoll.manager import Record
from atoll.server.middleware.auth import SESSION_HEADER, AppServices, take_in
from atoll.server.routes.openapi_parts import SandboxId
from atoll.server.telemetry import stamping
from atoll.server.telemetry.relay import Export
from atoll.service.sandbox_telemetry import TELEMETRY_LABEL, owners

router = APIRouter(prefix="/otlp/{sandbox_id}/v1", tags=["telemetry"])
PROTOBUF, JSON = "application/x-protobuf", "application/json"
MAX_BODY = 1 << 20
"""Maximum size of a body as it is sent."""
_RETRY_S = 5
_ACCEPTED = {PROTOBUF: b"", JSON: b"{}"}
_SessionKey = Annotated[str, Header(alias=SESSION_HEADER, max_length=512, description="The key of the sandbox.")]
_Signal = Annotated[Literal["traces", "metrics", "logs"], Path(description="What is exported.")]
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_OBJECT: dict[str, Any] = {"schema": {"type": "object"}}


@router.post(
    "/{signal}",
    operation_id="export_telemetry",
    summary="Export telemetry",
    response_class=Response,
    responses={200: {"description": "It is passed on.", "content": {PROTOBUF: _BINARY, JSON: _OBJECT}}},
    openapi_extra={"requestBody": {"required": True, "content": {PROTOBUF: _BINARY, JSON: _OBJECT}}},
)
async def export(
    request: Request, services: AppServices, sandbox_id: SandboxId, signal: _Signal, key: _SessionKey = ""
) -> Response:
    """Send traces, metrics or logs from inside a sandbox that was started with `telemetry` to the collector of the
    server's operator. The server adds the sandbox, its user and its task to each resource. Answers 404 if the server or
    the sandbox has no telemetry, and 503 while there is no room for more."""
    relay = services.relay
    if relay is None:
        raise HTTPException(404, "this server relays no telemetry")
    take_in(request, await services.sandboxes.callbacks.admit(sandbox_id, key))
    record = await services.manager.recall(sandbox_id)
    if record is None or TELEMETRY_LABEL not in record.labels:
        raise HTTPException(404, "this sandbox was started without `telemetry`")
    telemetry = services.sandboxes.telemetry
    telemetry.count_export(record)
    kind, encoding = _described(request)
    data = await _read(request)
    body = await workers.run(workers.TRANSFER, _stamped, data, kind, encoding, signal, record)
    telemetry.count_bytes(record, len(body))
    if not relay.offer(record.owner or "", Export(signal, kind, body)):
        raise HTTPException(503, "there is no room for more telemetry at the moment", {"Retry-After": f"{_RETRY_S}"})
    return Response(_ACCEPTED[kind], media_type=kind)


def _described(request: Request) -> tuple[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if kind not in _ACCEPTED or encoding not in ("identity", "gzip"):
        raise HTTPException(415, f"send {PROTOBUF} or {JSON}, as it is or as gzip")
    return kind, encoding


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"the body may have at most {MAX_BODY} bytes", {"Connection": "close"})
    return bytes(data)


def _stamped(data: bytes, kind: str, encoding: str, signal: str, record: Record) -> bytes:
    try:
        content = stamping.decompressed(data) if encoding == "gzip" else data
    except stamping.TooLargeError as error:
        raise HTTPException(413, str(error)) from error
    if kind == JSON:
        return stamping.stamped_json(content, signal, owners(record))
    return stamping.stamped(content, owners(record))
