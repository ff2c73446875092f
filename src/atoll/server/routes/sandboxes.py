"""Sandboxes: find, start, pause, resume, extend, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import BaseModel, Field

from atoll.engines.contract import LimitReporting
from atoll.errors import SandboxNotFoundError
from atoll.model.state import SandboxStatus
from atoll.sandbox.sandbox import MAX_LEASE_S
from atoll.server.connections.streaming import while_connected
from atoll.server.logs.request_context import know_sandbox
from atoll.server.middleware.auth import (
    SESSION_HEADER,
    AppServices,
    ManageScope,
    ReadScope,
    SandboxReadScope,
    SandboxUseScope,
    take_in,
)
from atoll.server.routes.openapi_parts import CREATED, IdempotencyKey, Limit, PageId, SandboxId, Success, locate
from atoll.service import ForkRequest, SandboxInfo, SandboxPage, SandboxRequest
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import Lifetime, SandboxSettings

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])


_LIFETIME = {"lifetime_s": "lifetime"}


class Usage(BaseModel):
    """The resources that a sandbox uses, and how often it reached its limits. Null where the engine cannot measure
    it."""

    memory_bytes: int | None
    """Memory in use."""
    cpu_s: float | None
    """CPU seconds used since the sandbox started."""
    pids: int | None
    """Number of processes."""
    disk_bytes: int | None
    """Disk space in use."""
    oom_kills: int | None = None
    """How often a process was killed because the memory limit was reached."""
    pids_refused: int | None = None
    """How often a process could not be started because of the limit."""
    disk_full: bool | None = None
    """Whether the disk limit was reached."""


class ExpiryRequest(RequestModel):
    """The lifetime to set."""

    of = "an expiry"
    other_names = _LIFETIME
    lifetime: Lifetime
    """New lifetime in seconds, counted from now. The server may allow less."""


class KeepAliveRequest(RequestModel):
    """How long to count the sandbox as in use."""

    of = "a keep-alive"
    seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_S)]
    """Seconds, counted from now. An earlier request for longer stays in effect."""


class PauseRequest(RequestModel):
    """How to pause the sandbox."""

    of = "a pause"
    memory: Literal["ram", "disk"] = "ram"
    """`ram` keeps the memory of the sandbox; `disk` saves it to disk, so that it uses no memory. `disk` needs isolation
    level `gvisor`, and nobody may be connected to the sandbox."""
    drop_connections: bool = False
    """Connections to the outside cannot be saved to disk, so with `disk` an open one makes the request fail unless this
    is true."""


class PauseOldRequest(RequestModel):
    """How many sandboxes may stay running."""

    max_num_sandboxes: Annotated[int, Field(gt=0)]
    """The most sandboxes that are left running."""


@router.get("/search", operation_id="search_sandboxes", summary="List sandboxes")
async def search(
    caller: ReadScope,
    services: AppServices,
    page_id: PageId = None,
    limit: Limit = 100,
    status: Annotated[SandboxStatus | None, Query(description="Only sandboxes in this state.")] = None,
    name: Annotated[str | None, Query(max_length=128, description="Only sandboxes of this name.")] = None,
    label: Annotated[
        list[str] | None,
        Query(max_length=16, description="Only sandboxes with this label, as `NAME=VALUE`. May be repeated."),
    ] = None,
    ended: Annotated[bool, Query(description="Return sandboxes that have ended instead of existing ones.")] = False,
) -> SandboxPage:
    """Return the caller's sandboxes, newest first, one page at a time. The filters can be combined."""
    labels = dict(_pair(text) for text in label or ())
    return await services.sandboxes.search_sandboxes(
        caller, page_id, limit, status=status, name=name, labels=labels, ended=ended
    )


@router.get("", operation_id="batch_get_sandboxes", summary="Get several sandboxes")
async def batch_get(
    caller: ReadScope,
    services: AppServices,
    id: Annotated[
        list[str], Query(min_length=1, max_length=100, description="The ids, names or task ids of the sandboxes.")
    ],
) -> list[SandboxInfo | None]:
    """Return several sandboxes in the order of the ids, with null for each one that does not exist."""
    return await services.sandboxes.batch_get_sandboxes(caller, id)


@router.post("", operation_id="start_sandbox", summary="Start a sandbox", status_code=201, responses=CREATED)
async def start(
    caller: ManageScope,
    services: AppServices,
    request: Request,
    response: Response,
    sandbox_spec_id: Annotated[
        str | None, Query(max_length=128, description="The spec to start from; the same as in the body.")
    ] = None,
    wanted: Annotated[SandboxRequest | None, Body()] = None,
    key: IdempotencyKey = None,
) -> SandboxInfo:
    """Start a sandbox from a spec, from the default spec, or from `settings`. The answer comes when the sandbox runs.
    If the client disconnects before that, no sandbox is left behind, unless the request has an idempotency key."""
    wanted = wanted or SandboxRequest()
    if sandbox_spec_id is not None:
        if wanted.sandbox_spec_id not in (None, sandbox_spec_id):
            raise ValueError("sandbox_spec_id differs between the query and the body: send it once")
        wanted = wanted.model_copy(update={"sandbox_spec_id": sandbox_spec_id})
    work = services.sandboxes.creation.start(caller, wanted, key=key)
    made = await (while_connected(request, work) if key is None else work)
    know_sandbox(made.id)
    locate(response, f"/sandboxes/{made.id}")
    return made


@router.post("/pause-old", operation_id="pause_old_sandboxes", summary="Pause the oldest sandboxes")
async def pause_old(caller: ManageScope, services: AppServices, wanted: PauseOldRequest) -> list[str]:
    """Pause the caller's oldest running sandboxes until at most the given number are running. Returns the ids of the
    paused sandboxes."""
    return await services.sandboxes.pause_old_sandboxes(caller, wanted.max_num_sandboxes)


@router.get("/by-session-key", operation_id="get_sandbox_by_session_key", summary="Find the sandbox of a session key")
async def by_session_key(
    request: Request,
    services: AppServices,
    key: Annotated[str, Header(alias=SESSION_HEADER, max_length=512, description="The session key.")] = "",
) -> SandboxInfo:
    """Return the sandbox that a session key belongs to. Answers 401 if the key is unknown or its sandbox is not
    running."""
    take_in(request, await services.sandboxes.credentials.by_session_key(key))
    return await services.sandboxes.get_sandbox_by_session_api_key(key)


@router.get("/{sandbox_id}", operation_id="get_sandbox", summary="Get a sandbox")
async def get(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    resources: Annotated[bool, Query(description="Whether to include the resources in use.")] = False,
) -> SandboxInfo:
    """Return one sandbox in its present state. Answers 410, with the cause, if the sandbox has ended."""
    return await services.sandboxes.describe(caller, sandbox_id, resources=resources)


@router.post("/{sandbox_id}/pause", operation_id="pause_sandbox", summary="Pause a sandbox")
async def pause(
    caller: ManageScope,
    services: AppServices,
    sandbox_id: SandboxId,
    wanted: Annotated[PauseRequest | None, Body()] = None,
) -> Success:
    """Stop all processes of a sandbox where they are, until it is resumed. Pausing a paused sandbox changes nothing."""
    wanted = wanted or PauseRequest()
    done = await services.sandboxes.pause_sandbox(
        caller, sandbox_id, memory=wanted.memory, drop_connections=wanted.drop_connections
    )
    return _found(done, sandbox_id)


@router.post("/{sandbox_id}/fork", operation_id="fork_sandbox", summary="Fork a sandbox", status_code=201)
async def fork(
    caller: ManageScope,
    services: AppServices,
    sandbox_id: SandboxId,
    request: Request,
    wanted: Annotated[ForkRequest | None, Body()] = None,
    key: IdempotencyKey = None,
) -> list[SandboxInfo]:
    """Make new sandboxes that start from the state of this one, or from one of its checkpoints. Either all forks are
    made or none. The answer comes when they run. If the client disconnects before that, none is left behind, unless the
    request has an idempotency key."""
    work = services.sandboxes.creation.fork(caller, sandbox_id, wanted or ForkRequest(), key=key)
    return await (while_connected(request, work) if key is None else work)


@router.post("/{sandbox_id}/resume", operation_id="resume_sandbox", summary="Resume a sandbox")
async def resume(caller: ManageScope, services: AppServices, sandbox_id: SandboxId) -> Success:
    """Let the processes of a paused sandbox continue. A sandbox that the server paused by itself is also resumed by any
    use of it."""
    return _found(await services.sandboxes.resume_sandbox(caller, sandbox_id), sandbox_id)


@router.delete("/{sandbox_id}", operation_id="delete_sandbox", summary="Delete a sandbox")
async def delete(caller: ManageScope, services: AppServices, sandbox_id: SandboxId) -> Success:
    """End a sandbox and delete everything in it, including its checkpoints."""
    return _found(await services.sandboxes.delete_sandbox(caller, sandbox_id), sandbox_id)


@router.get("/{sandbox_id}/wait", operation_id="wait_for_sandbox_running", summary="Wait until a sandbox runs")
async def wait(
    caller: SandboxReadScope,
    services: AppServices,
    sandbox_id: SandboxId,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=600, description="How many seconds to wait.")] = 120,
) -> SandboxInfo:
    """Wait until the sandbox is running, then return it. Answers 410 if it ends instead, and 504 if it takes longer
    than `timeout`."""
    work = services.sandboxes.wait_for_sandbox_running(caller, sandbox_id, timeout)
    return await while_connected(request, work)


@router.put("/{sandbox_id}/expiry", operation_id="extend_sandbox", summary="Set the lifetime of a sandbox")
async def extend(
    caller: ManageScope, services: AppServices, sandbox_id: SandboxId, wanted: ExpiryRequest
) -> SandboxInfo:
    """Set how long the sandbox may live from now on, whether it is used or not."""
    return await services.sandboxes.extend(caller, sandbox_id, wanted.lifetime)


@router.post("/{sandbox_id}/keep-alive", operation_id="keep_sandbox_alive", summary="Keep a sandbox alive")
async def keep_alive(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: KeepAliveRequest
) -> SandboxInfo:
    """Count the sandbox as in use for some seconds, whatever it does, so that it does not become idle. Its lifetime can
    still end it."""
    return await services.sandboxes.keep_alive(caller, sandbox_id, wanted.seconds)


@router.get("/{sandbox_id}/settings", operation_id="sandbox_settings", summary="Get the settings of a sandbox")
async def settings(caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId) -> SandboxSettings:
    """Return the settings that the sandbox was made from."""
    return await services.sandboxes.settings(caller, sandbox_id)


@router.get("/{sandbox_id}/stats", operation_id="sandbox_stats", summary="Get the resources of a sandbox")
async def stats(caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId) -> Usage:
    """Return the resources that the sandbox uses at the moment, and how often it reached its limits."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    found = await sandbox.stats()
    usage = Usage(memory_bytes=found.memory_bytes, cpu_s=found.cpu_s, pids=found.pids, disk_bytes=found.disk_bytes)
    engine = await sandbox.access.engine()
    if isinstance(engine, LimitReporting):
        hit = await engine.limit_events(sandbox.access.handle())
        usage.oom_kills, usage.pids_refused, usage.disk_full = hit.oom_kills, hit.pids_refused, hit.disk_full
    return usage


def _found(done: bool, sandbox_id: str) -> Success:
    if not done:
        raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
    return Success()


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("invalid label: write NAME=VALUE")
    return name, value
