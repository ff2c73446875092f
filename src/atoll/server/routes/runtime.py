"""The runtime API that OpenHands's remote back end speaks, below /runtime, with an API key as `X-API-Key`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from atoll.server.logs.request_context import know_sandbox
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope
from atoll.service.models.openhands_runtime import RuntimeChoice, RuntimeInfo, RuntimeList, RuntimeStart

router = APIRouter(prefix="/runtime", tags=["runtime"])
SessionId = Annotated[str, Path(max_length=128, description="The id of the session.")]
RuntimeId = Annotated[str, Path(max_length=128, description="The id of the runtime.")]


@router.post("/start", operation_id="start_runtime", summary="Start an OpenHands runtime")
async def start(caller: ManageScope, services: AppServices, wanted: RuntimeStart) -> RuntimeInfo:
    """Start the sandbox of a session, or return the one that the same request started before. The answer comes when the
    sandbox runs, or with status `starting` if that takes long."""
    made = await services.runtimes.start(caller, wanted)
    know_sandbox(made.runtime_id)
    return made


@router.post("/stop", operation_id="stop_runtime", summary="Delete an OpenHands runtime")
async def stop(caller: ManageScope, services: AppServices, wanted: RuntimeChoice) -> RuntimeInfo:
    """Delete a runtime and everything in it."""
    return await services.runtimes.stop(caller, wanted.runtime_id)


@router.post("/pause", operation_id="pause_runtime", summary="Pause an OpenHands runtime")
async def pause(caller: ManageScope, services: AppServices, wanted: RuntimeChoice) -> RuntimeInfo:
    """Stop all processes of a runtime where they are. Pausing a paused runtime changes nothing."""
    return await services.runtimes.pause(caller, wanted.runtime_id)


@router.post("/resume", operation_id="resume_runtime", summary="Resume an OpenHands runtime")
async def resume(caller: ManageScope, services: AppServices, wanted: RuntimeChoice) -> RuntimeInfo:
    """Let the processes of a paused runtime continue."""
    return await services.runtimes.resume(caller, wanted.runtime_id)


@router.get("/list", operation_id="list_runtimes", summary="List OpenHands runtimes")
async def list_all(caller: ReadScope, services: AppServices) -> RuntimeList:
    """Return the caller's running and starting runtimes, newest first."""
    return RuntimeList(runtimes=await services.runtimes.running(caller))


@router.get("/sessions/batch", operation_id="batch_get_sessions", summary="Get the runtimes of several sessions")
async def batch(
    caller: ReadScope,
    services: AppServices,
    ids: Annotated[list[str], Query(min_length=1, max_length=100, description="The ids of the sessions.")],
) -> list[RuntimeInfo | None]:
    """Return the runtimes of several sessions in the order of the ids, with null for each one that does not exist."""
    return await services.runtimes.batch(caller, ids)


@router.get("/sessions/{session_id}", operation_id="get_session", summary="Get the runtime of a session")
async def session(caller: ReadScope, services: AppServices, session_id: SessionId) -> RuntimeInfo:
    """Return the runtime of a session, also while it is paused."""
    return await services.runtimes.get(caller, session_id)


@router.get("/runtime/{runtime_id}", operation_id="get_runtime", summary="Get an OpenHands runtime")
async def runtime(caller: ReadScope, services: AppServices, runtime_id: RuntimeId) -> RuntimeInfo:
    """Return a runtime by its own id, as older releases of OpenHands request it."""
    return await services.runtimes.describe(caller, runtime_id)
