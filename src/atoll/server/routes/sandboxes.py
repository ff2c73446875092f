"""Sandboxes: find, start, pause, resume, extend, delete."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import HTTPConnection

from atoll.engines.base import LimitReporting
from atoll.errors import SandboxNotFoundError
from atoll.sandbox import MOST_LEASE_S
from atoll.server.admission import admission_of
from atoll.server.auth import (
    SESSION_HEADER,
    Manager,
    Reader,
    SandboxReader,
    SandboxUser,
    Services_,
    services_of,
    take_in,
)
from atoll.server.streaming import while_connected
from atoll.service import ForkStart, SandboxInfo, SandboxPage, SandboxStart, SandboxStatus, Success
from atoll.service.models import Lifetime, SandboxSettings

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])


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
    """Routes that find out by themselves who asks take ids only."""
    known = admission_of(connection.scope)
    return sandbox_id if known is None else await services_of(connection).sandboxes.resolve(known.caller, sandbox_id)


SandboxId = Annotated[str, Depends(_resolved)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="Repeat a request with the same key as often as you like: it is done once.",
    ),
]
PageId = Annotated[str | None, Query(max_length=512, description="`next_page_id` of the page before.")]
Limit = Annotated[int, Query(gt=0, le=100)]


class Usage(BaseModel):
    """Resources in use; null for what the engine cannot know."""

    memory_bytes: int | None
    cpu_s: float | None
    pids: int | None
    disk_bytes: int | None
    oom_kills: int | None = None
    pids_refused: int | None = None
    disk_full: bool | None = None


class Expiry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lifetime_s: Lifetime
    """So long from now on."""


class KeepAlive(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seconds: Annotated[float, Field(gt=0, le=MOST_LEASE_S)]
    """Counted from now. A longer lease that was taken earlier remains."""


class Pause(BaseModel):
    model_config = ConfigDict(extra="forbid")
    memory: Literal["ram", "disk"] = "ram"
    """On the disk it takes no memory meanwhile. That needs isolation `gvisor`, and nobody may be connected."""
    drop_connections: bool = False
    """Connections to the outside cannot be saved on the disk, and are in the way unless they may be dropped."""


class PauseOld(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_num_sandboxes: Annotated[int, Field(gt=0)]


@router.get("/search", operation_id="search_sandboxes")
async def search(
    caller: Reader,
    services: Services_,
    page_id: PageId = None,
    limit: Limit = 100,
    status: SandboxStatus | None = None,
    name: Annotated[str | None, Query(max_length=128)] = None,
    label: Annotated[list[str] | None, Query(max_length=16, description="`NAME=VALUE`; all must match.")] = None,
    ended: Annotated[bool, Query(description="Those that are gone, with their causes.")] = False,
) -> SandboxPage:
    """The caller's sandboxes, the newest first."""
    labels = dict(_pair(text) for text in label or ())
    return await services.sandboxes.search_sandboxes(
        caller, page_id, limit, status=status, name=name, labels=labels, ended=ended
    )


@router.get("", operation_id="batch_get_sandboxes")
async def batch_get(
    caller: Reader, services: Services_, id: Annotated[list[str], Query(min_length=1, max_length=100)]
) -> list[SandboxInfo | None]:
    """Several at once, in the order asked for; null for what is not there."""
    return await services.sandboxes.batch_get_sandboxes(caller, id)


@router.post("", operation_id="start_sandbox")
async def start(
    caller: Manager,
    services: Services_,
    request: Request,
    sandbox_spec_id: Annotated[str | None, Query(max_length=128)] = None,
    wanted: Annotated[SandboxStart | None, Body()] = None,
    key: IdempotencyKey = None,
) -> SandboxInfo:
    """Start a sandbox of a spec, of the default one, or as `settings` say. Answers when it runs. If the client goes
    away before that, no sandbox is made, unless the request has an idempotency key."""
    wanted = wanted or SandboxStart()
    if sandbox_spec_id is not None:
        if wanted.sandbox_spec_id not in (None, sandbox_spec_id):
            raise ValueError("sandbox_spec_id in the query and in the body differ")
        wanted = wanted.model_copy(update={"sandbox_spec_id": sandbox_spec_id})
    work = services.sandboxes.start_sandbox(caller, wanted, key=key)
    return await (while_connected(request, work) if key is None else work)


@router.post("/pause-old", operation_id="pause_old_sandboxes")
async def pause_old(caller: Manager, services: Services_, wanted: PauseOld) -> list[str]:
    """Pause the oldest that run until so many are left; the ids of those paused."""
    return await services.sandboxes.pause_old_sandboxes(caller, wanted.max_num_sandboxes)


@router.get("/by-session-key", operation_id="get_sandbox_by_session_key")
async def by_session_key(
    request: Request, services: Services_, key: Annotated[str, Header(alias=SESSION_HEADER, max_length=512)] = ""
) -> SandboxInfo:
    """The sandbox that the session key in the header is for. 401 if it is unknown, or its sandbox does not run."""
    take_in(request, await services.sandboxes.by_session_key(key))
    return await services.sandboxes.get_sandbox_by_session_api_key(key)


@router.get("/{sandbox_id}", operation_id="get_sandbox")
async def get(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    resources: Annotated[bool, Query(description="Also what it uses right now.")] = False,
) -> SandboxInfo:
    """One sandbox as it is now. 410 with the cause if it has ended."""
    return await services.sandboxes.describe(caller, sandbox_id, resources=resources)


@router.post("/{sandbox_id}/pause", operation_id="pause_sandbox")
async def pause(
    caller: Manager, services: Services_, sandbox_id: SandboxId, wanted: Annotated[Pause | None, Body()] = None
) -> Success:
    """Stop its processes where they are. May be repeated."""
    wanted = wanted or Pause()
    done = await services.sandboxes.pause_sandbox(
        caller, sandbox_id, memory=wanted.memory, drop_connections=wanted.drop_connections
    )
    return _found(done, sandbox_id)


@router.post("/{sandbox_id}/fork", operation_id="fork_sandbox")
async def fork(
    caller: Manager,
    services: Services_,
    sandbox_id: SandboxId,
    request: Request,
    wanted: Annotated[ForkStart | None, Body()] = None,
    key: IdempotencyKey = None,
) -> list[SandboxInfo]:
    """New sandboxes that begin as this one is, or was at a checkpoint: all, or none. Answers when they run. If the
    client goes away before that, none is made, unless the request has an idempotency key."""
    work = services.sandboxes.fork_sandbox(caller, sandbox_id, wanted or ForkStart(), key=key)
    return await (while_connected(request, work) if key is None else work)


@router.post("/{sandbox_id}/resume", operation_id="resume_sandbox")
async def resume(caller: Manager, services: Services_, sandbox_id: SandboxId) -> Success:
    """Resume a paused sandbox. One that the server paused by itself is also resumed by any use of it."""
    return _found(await services.sandboxes.resume_sandbox(caller, sandbox_id), sandbox_id)


@router.delete("/{sandbox_id}", operation_id="delete_sandbox")
async def delete(caller: Manager, services: Services_, sandbox_id: SandboxId) -> Success:
    """Delete it and everything in it."""
    return _found(await services.sandboxes.delete_sandbox(caller, sandbox_id), sandbox_id)


@router.get("/{sandbox_id}/wait", operation_id="wait_for_sandbox_running")
async def wait(
    caller: SandboxReader,
    services: Services_,
    sandbox_id: SandboxId,
    request: Request,
    timeout: Annotated[float, Query(gt=0, le=600)] = 120,
) -> SandboxInfo:
    """Answers when it runs; 410 if it ends instead, 504 if it takes longer."""
    work = services.sandboxes.wait_for_sandbox_running(caller, sandbox_id, timeout)
    return await while_connected(request, work)


@router.put("/{sandbox_id}/expiry", operation_id="extend_sandbox")
async def extend(caller: Manager, services: Services_, sandbox_id: SandboxId, wanted: Expiry) -> SandboxInfo:
    """How long it may live from now on, used or not."""
    return await services.sandboxes.extend(caller, sandbox_id, wanted.lifetime_s)


@router.post("/{sandbox_id}/keep-alive", operation_id="keep_sandbox_alive")
async def keep_alive(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: KeepAlive) -> SandboxInfo:
    """Count the sandbox as in use for this many seconds, whatever it does. Its lifetime still ends it."""
    return await services.sandboxes.keep_alive(caller, sandbox_id, wanted.seconds)


@router.get("/{sandbox_id}/settings", operation_id="sandbox_settings")
async def settings(caller: SandboxReader, services: Services_, sandbox_id: SandboxId) -> SandboxSettings:
    """What it was made from."""
    return await services.sandboxes.settings(caller, sandbox_id)


@router.get("/{sandbox_id}/stats", operation_id="sandbox_stats")
async def stats(caller: SandboxReader, services: Services_, sandbox_id: SandboxId) -> Usage:
    """Resources in use, and how often its limits were hit."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    found = await sandbox.stats()
    usage = Usage(memory_bytes=found.memory_bytes, cpu_s=found.cpu_s, pids=found.pids, disk_bytes=found.disk_bytes)
    engine = await sandbox._the_engine()
    if isinstance(engine, LimitReporting):
        hit = await engine.limit_events(sandbox._created())
        usage.oom_kills, usage.pids_refused, usage.disk_full = hit.oom_kills, hit.pids_refused, hit.disk_full
    return usage


def _found(done: bool, sandbox_id: str) -> Success:
    if not done:
        raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
    return Success()


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("a label is NAME=VALUE")
    return name, value
